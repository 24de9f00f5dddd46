"""The image of a cluster's hosts: built from this checkout; what its own requirements ask for comes on top."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
DOCKER = CHECKOUT / "docker"
IMAGE = "hetero"
OFFICIAL_BASE = "python:3.11-slim"
OWN_BASE = "hetero-base"
_BUILD_BYTES = 8 * 10**9  # what building takes where Docker keeps its images


class Refused(Exception):
    """Nothing was started: what is wrong, and the next step."""


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of docker's that answers soon."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)  # noqa: S607  any docker


def is_there(image: str) -> bool:
    """Return whether this machine has an image."""
    return docker("image", "inspect", image).returncode == 0


def room(folder: Path, least_bytes: int, what: str, advice: str) -> None:
    """Refuse where a disk is too full."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < least_bytes:
        raise Refused(
            f"{folder} has {free_bytes / 10**6:.0f} MB free; {what} may need {least_bytes / 10**6:.0f} MB. {advice}."
        )


def requirements_file(cluster_file: Path) -> Path:
    """Return the path of the requirements that a cluster's image is to have on top, which need not be there."""
    return cluster_file.with_suffix(".requirements.txt")


def image_name(cluster_file: Path) -> str:
    """Return the name of a cluster's image: one of its own if it has requirements of its own."""
    if not requirements_file(cluster_file).exists():
        return IMAGE
    stem = re.sub(r"[^a-z0-9]+", "-", cluster_file.stem.lower()).strip("-")
    return f"{IMAGE}-{stem or 'cluster'}"


def build(cluster_file: Path, image: str) -> None:
    """Build the image of a cluster; what has not changed since the last time is not built again."""
    where = docker_root()
    if where and not is_there(IMAGE):
        room(where, _BUILD_BYTES, "building the image", "Make room, as with docker system prune")
    certificates()
    base = OFFICIAL_BASE if is_there(OFFICIAL_BASE) else base_image()
    print(f"Building image {IMAGE} (minutes the first time) ...", flush=True)
    docker_build(IMAGE, DOCKER / "Dockerfile", CHECKOUT, f"BASE={base}")
    if image == IMAGE:
        return
    print(f"Building image {image} with {requirements_file(cluster_file)} ...", flush=True)
    with tempfile.TemporaryDirectory() as context:
        for path in (DOCKER / "stage", *DOCKER.glob("wheels/*.whl"), *DOCKER.glob("ca/*.crt")):
            shutil.copy(path, context)
        shutil.copy(requirements_file(cluster_file), Path(context) / "requirements.txt")
        docker_build(image, DOCKER / "requirements.Dockerfile", Path(context), f"IMAGE={IMAGE}")


def docker_root() -> Path | None:
    """Return where Docker keeps its images, if that is on this machine."""
    said = docker("info", "--format", "{{.DockerRootDir}}")
    root = Path(said.stdout.strip() or "/nowhere")
    return root if root.exists() else None


def certificates() -> None:
    """Hand on the certificates that pip is told to trust here: an index behind a proxy needs them in the image."""
    given = next(
        (os.environ[name] for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE") if os.environ.get(name)), None
    )
    if given and Path(given).is_file() and not any(DOCKER.glob("ca/*.crt")):
        (DOCKER / "ca").mkdir(exist_ok=True)
        shutil.copy(given, DOCKER / "ca" / "given.crt")


def base_image() -> str:
    """Pull the official image, or make one of Debian packages; return its name."""
    pulled = docker("pull", "-q", OFFICIAL_BASE)
    if pulled.returncode == 0:
        return OFFICIAL_BASE
    if is_there(OWN_BASE):
        return OWN_BASE
    why = pulled.stderr.strip()
    if shutil.which("debootstrap") is None:
        raise Refused(
            f"{OFFICIAL_BASE} cannot be pulled: {why} Give Docker the way to its registry; or install debootstrap, "
            f"with which docker/base makes a base image (Debian: apt-get install debootstrap)."
        )
    print(f"{OFFICIAL_BASE} cannot be pulled; making {OWN_BASE} of Debian packages (a minute) ...", flush=True)
    if subprocess.run([str(DOCKER / "base"), OWN_BASE], check=False).returncode:
        raise Refused(f"{OFFICIAL_BASE} cannot be pulled ({why}), and docker/base failed: see above.")
    return OWN_BASE


def docker_build(image: str, dockerfile: Path, context: Path, argument: str) -> None:
    """Build one image; its output is shown only if that fails."""
    command = ["docker", "build", "--network", "host", "-f", str(dockerfile), "-t", image, "--build-arg", argument]
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "HOROVOD_DEBUG"):
        command += ["--build-arg", name] if os.environ.get(name) else []
    said = subprocess.run([*command, str(context)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if said.returncode:
        sys.stderr.write(said.stdout.decode(errors="replace")[-6000:])
        raise Refused(f"Building image {image} failed: see above.")
