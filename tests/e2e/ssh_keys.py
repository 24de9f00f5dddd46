"""What images for MPI have for ssh: a key that opens every host to every other one, and a home to keep it in."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

HOME = "/tmp/root"  # a host's /tmp is its own; the machine's /root stays as it is


def etc() -> dict[str, str]:
    """Return the files of /etc with which sshd lets root in, whose home is `HOME`."""
    assert Path("/usr/sbin/sshd").exists(), "sshd is missing: apt-get install openssh-server openmpi-bin"
    passwd = Path("/etc/passwd").read_text().splitlines(keepends=True)
    lines = [f"root:x:0:0:root:{HOME}:/bin/bash\n" if line.startswith("root:") else line for line in passwd]
    # As the toolkit advises: a login sets an audit id, which a container may not.
    pam = Path("/etc/pam.d/sshd").read_text().replace("required     pam_loginuid.so", "optional     pam_loginuid.so")
    return {"passwd": "".join(lines), "pam.d/sshd": pam}


def make_key(folder: Path) -> Path:
    """Make a key pair in a new folder; return the folder, which is the `.ssh` of every host."""
    folder.mkdir(parents=True)
    key = folder / "id_rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(key)], check=True)
    shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")
    (folder / "config").write_text("Host *\n  StrictHostKeyChecking no\n  LogLevel ERROR\n")
    return folder


def furnish(tmp: Path, key: Path) -> None:
    """Make root's home in the folder that will be a host's /tmp."""
    home = tmp / Path(HOME).name
    shutil.copytree(key, home / ".ssh")
    for folder in (home, home / ".ssh"):
        folder.chmod(0o700)
