"""What a start takes without hetero: a plain process that imports TensorFlow and builds the demo's model.

Prints one JSON line: when each moment came (seconds since 1970), and the model's configuration. `startup.py` runs it,
and checks that the model is the one that examples/digits/job.py trains.
"""

import json
import os
import sys
import time

moments = {"python": time.time()}

import keras  # noqa: E402 - the same imports as examples/digits/job.py has, in its order
import numpy as np  # noqa: E402,F401
import tensorflow as tf  # noqa: E402,F401

moments["tensorflow"] = time.time()
keras.utils.set_random_seed(0)
layers = [keras.Input((32, 32, 4))]
for channels in (16, 32, 64):
    layers += [keras.layers.Conv2D(channels, 3, padding="same", activation="relu"), keras.layers.MaxPool2D()]
model = keras.Sequential([*layers, keras.layers.Flatten(), keras.layers.Dense(10)])
moments["model"] = time.time()
print(json.dumps({"moments": moments, "model": json.loads(model.to_json())}))
sys.stdout.flush()
os._exit(0)  # an orderly end takes time that nobody asked for
