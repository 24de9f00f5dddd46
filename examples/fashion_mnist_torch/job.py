"""Fashion-MNIST with PyTorch: data hosts blur the pictures, one rank (or several) trains the network on them.

    hetero run --job examples/fashion_mnist_torch/job.py:job --channel training=FOLDER --data-hosts 2 --trainer-hosts 1

FOLDER holds the four .gz files of Fashion-MNIST. Without the channel the job takes scikit-learn's handwritten digits.
"""

import functools
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - everybody's name for it
from torch import nn

import hetero
from hetero.inputs import idx
from hetero.torch import BatchStream

# A job is a name and its own defaults, which flags override (`--epochs 3 --lr 0.5`). `framework="torch"`: ranks load
# neither TensorFlow nor Horovod, and find the environment that torch.distributed asks for.
job = hetero.Job("fashion_mnist_torch", engine="grpc", framework="torch", batch_size=64, epochs=2, lr=1.0, gamma=0.7)

SIDE = 28  # pixels
KERNEL = 11  # pixels of the blur
SIGMAS = (0.1, 2.0)  # pixels, drawn for each row in training
TEST_SIGMA = 1.0
MEAN, STD = 0.286, 0.353  # of Fashion-MNIST's training pictures
SPLIT_BATCHES = 15


@functools.cache
def rows(folder, part):
    """Load uint8 pictures (rows, 28, 28) and int64 labels (rows,) of a part, "train" or "t10k"; once in a process."""
    if folder is not None:
        images, labels = (idx.read(Path(folder) / f"{part}-{kind}-ubyte.gz") for kind in ("images-idx3", "labels-idx1"))
        return images, labels.astype(np.int64)
    from sklearn.datasets import load_digits

    digits = load_digits()
    test = np.arange(len(digits.target)) % 5 == 0
    chosen = test if part == "t10k" else ~test
    images = torch.from_numpy(digits.images[chosen])[:, None] * (255 / 16)
    images = F.interpolate(images, (SIDE, SIDE), mode="bilinear")[:, 0]
    return images.to(torch.uint8).numpy(), digits.target[chosen].astype(np.int64)


def prepared(images, sigmas):
    """Blur and normalise.

    Args:
        images: uint8 (rows, 28, 28).
        sigmas: float32 (rows,), width of each row's blur in pixels.

    Returns:
        float32 tensor (rows, 1, 28, 28).
    """
    offsets = torch.arange(KERNEL) - KERNEL // 2
    bells = torch.exp(-0.5 * (offsets / torch.from_numpy(sigmas)[:, None]) ** 2)
    bells /= bells.sum(1, keepdim=True)
    kernels = bells[:, :, None] * bells[:, None, :]
    pixels = torch.from_numpy(images).float()[None] / 255.0
    margin = KERNEL // 2
    pixels = F.pad(pixels, (margin, margin, margin, margin), mode="reflect")
    # Every row is a channel of one picture, with a kernel of its own.
    blurred = F.conv2d(pixels, kernels[:, None], groups=len(images))
    return (blurred[0, :, None] - MEAN) / STD


# The pieces of the input that workers share out: ranges of rows, of whole batches where possible.
@job.splits
def splits(ctx):
    count = len(rows(ctx.channels.get("training"), "train")[1])
    step = SPLIT_BATCHES * ctx.batch_size
    return [(start, min(start + step, count)) for start in range(0, count, step)]


# The batches of an epoch's splits. It runs on the data hosts, in several processes a host: one thread each.
@job.inputs
def inputs(ctx):
    torch.set_num_threads(1)
    images, labels = rows(ctx.channels.get("training"), "train")
    for start, stop in ctx.splits:
        # Randomness depends on the epoch and on the split, never on the worker: a split that is made again is the same.
        random = np.random.default_rng(ctx.seed_for([start, stop]))
        order = start + random.permutation(stop - start)
        sigmas = random.uniform(*SIGMAS, size=len(order)).astype(np.float32)
        for at in range(0, len(order), ctx.batch_size):
            batch = slice(at, at + ctx.batch_size)
            yield prepared(images[order[batch]], sigmas[batch]), labels[order[batch]]


class Network(nn.Module):
    """Two convolutions and two dense layers: float32 (rows, 1, 28, 28) to logits (rows, 10)."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(
            nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
        )

    def forward(self, images):
        """Return logits."""
        return self.head(self.features(images))


@torch.no_grad()
def accuracy(model, images, labels, device):
    """Return the share of test rows that the model gets right."""
    model.eval()
    right = 0
    for at in range(0, len(labels), 500):
        batch = slice(at, at + 500)
        pictures = prepared(images[batch], np.full(len(labels[batch]), TEST_SIGMA, np.float32))
        right += int((model(pictures.to(device)).argmax(1).cpu().numpy() == labels[batch]).sum())
    return right / len(labels)


# Called once in every rank. A single one trains by itself; several average their gradients over Gloo.
@job.train
def train(ctx):
    torch.manual_seed(ctx.seed)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", ctx.local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    model = Network().to(device)
    parallel = model
    if ctx.size > 1:
        dist.init_process_group("gloo")  # env://, set by hetero
        parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=ctx.params["lr"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=ctx.params["gamma"])
    for epoch in ctx.epochs():
        parallel.train()
        for images, labels in BatchStream(ctx, epoch, device=device):
            optimizer.zero_grad()
            loss = F.cross_entropy(parallel(images), labels)
            loss.backward()
            optimizer.step()
        schedule.step()
        if ctx.is_chief:
            test = rows(ctx.channels.get("training"), "t10k")
            ctx.log(loss=loss.item(), accuracy=accuracy(model, *test, device))
    if ctx.is_chief and ctx.model_dir is not None:
        ctx.model_dir.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), ctx.model_dir / "model.pt")
    if ctx.size > 1:
        dist.barrier()  # rank 0, which is where the ranks meet, may not leave first
        dist.destroy_process_group()
