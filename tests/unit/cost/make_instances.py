"""Write hetero/cost/instances.json: `python tests/unit/cost/make_instances.py`, with moto and botocore installed.

The names are those that SageMaker's API accepts for a training job (botocore's description of it). The figures are
EC2's, from answers of DescribeInstanceTypes that moto carries; types that EC2 lists no longer are below, from Amazon's
pages "Amazon EC2 P2 instances" and "Amazon EC2 P3 instances".
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import botocore
import moto

FILE = Path(__file__).parents[3] / "hetero" / "cost" / "instances.json"
RETIRED: dict[str, tuple[int, float, int]] = {
    "p2.xlarge": (4, 61, 1),
    "p2.8xlarge": (32, 488, 8),
    "p2.16xlarge": (64, 732, 16),
    "p3.2xlarge": (8, 61, 1),
    "p3.8xlarge": (32, 244, 4),
    "p3.16xlarge": (64, 488, 8),
}


def names() -> list[str]:
    """Return the instance types of training jobs, as SageMaker's API has them."""
    service = Path(botocore.__file__).parent / "data" / "sagemaker" / "2017-07-24" / "service-2.json.gz"
    described = json.loads(gzip.decompress(service.read_bytes()))
    return sorted(described["shapes"]["TrainingInstanceType"]["enum"])


def figures(described: dict[str, Any]) -> tuple[int, float, int]:
    """Return vCPUs, memory in GiB and GPUs of a type as EC2 describes it."""
    gpus = sum(gpu["Count"] for gpu in described.get("GpuInfo", {}).get("Gpus", []))
    return described["VCpuInfo"]["DefaultVCpus"], described["MemoryInfo"]["SizeInMiB"] / 1024, gpus


def main() -> None:
    """Write the file and say which names have no figures."""
    listed = Path(moto.__file__).parent / "ec2" / "resources" / "instance_types.json.gz"
    known = {name: figures(one) for name, one in json.loads(gzip.decompress(listed.read_bytes())).items()} | RETIRED
    types = {name: known[name[3:]] for name in names() if name[3:] in known}
    source = f"Amazon EC2 DescribeInstanceTypes, from moto {moto.__version__}; P2 and P3 from Amazon's pages"
    lines = ",\n".join(f'    "{name}": {json.dumps(one)}' for name, one in types.items())
    columns = '["vcpus", "memory_gib", "gpus"]'
    text = f'{{\n  "source": {json.dumps(source)},\n  "columns": {columns},\n  "types": {{\n{lines}\n  }}\n}}\n'
    FILE.write_text(text, encoding="utf-8")
    print(f"{len(types)} types; without figures: {', '.join(name for name in names() if name not in types)}")


if __name__ == "__main__":
    main()
