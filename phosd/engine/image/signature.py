"""Check who has signed an image from elsewhere, with OpenSSH's ``ssh-keygen``."""

import os
import pwd
import subprocess
from pathlib import Path

from phosd.engine.image import private_files
from phosd.errors import Internal, NotAuthorized, PhosError, Timeout
from phosd.portable import SIGNED_FOR, Head
from phosd.units import human_bytes

ALLOWED_SIGNERS = Path("/etc/phos/allowed_signers")
_SECONDS = 60.0
_MOST_SIGNERS = 1 << 20
_LIST_IT = (
    "ask the administrator to list the key that signed it in {file}, for {whom}; or sign it "
    "with one that is there, or import it as root with --trust"
)
_SIGN_IT = (
    "ask for a signed one (`--sign KEY` of `phos export` and `phos push`), by a key that {file} "
    "lists for {whom}, or import it as root with --trust"
)


def require_signed(head: Head, owner: int, signers: Path) -> None:
    """Raise :class:`NotAuthorized` unless the manifest is signed by a key that ``signers`` lists
    for the user ``owner``.

    ``signers`` is an ``allowed_signers`` file (``ssh-keygen(1)``) that root owns, with names of
    users as principals.
    """
    whom = _name(owner)
    if not head.signature:
        hint = _SIGN_IT.format(file=signers, whom=whom)
        raise NotAuthorized("nobody has signed the image", hint=hint)
    hint = _LIST_IT.format(file=signers, whom=whom)
    _require_signers(signers, hint)
    words = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", whom, "-n", SIGNED_FOR]
    with os.fdopen(os.memfd_create("signature"), "wb") as signature:
        signature.write(head.signature)
        signature.flush()
        number = signature.fileno()
        try:
            done = subprocess.run(
                [*words, "-s", f"/proc/self/fd/{number}"],
                input=head.manifest,
                capture_output=True,
                timeout=_SECONDS,
                env={"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                pass_fds=(number,),
                check=False,
            )
        except FileNotFoundError as error:
            raise Internal(
                "signatures cannot be checked: there is no ssh-keygen",
                hint="install openssh-client, or import the image as root with --trust",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise Timeout(
                f"ssh-keygen has not checked the signature within {_SECONDS:.0f} s",
                hint="try again when the machine is less busy",
            ) from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        why = f" ({said[-1]})" if said else ""
        raise NotAuthorized(
            f"the signature of the image is not one of {whom}'s for this image{why}", hint=hint
        )


def _require_signers(signers: Path, hint: str) -> None:
    """Raise unless the file is there, and nobody but root may change it."""
    try:
        os.close(private_files.open_private(signers, os.O_RDONLY, lent=True))
        size = signers.stat().st_size
    except FileNotFoundError as error:
        raise NotAuthorized(
            f"no key is trusted here to sign images: there is no {signers}", hint=hint
        ) from error
    except (PhosError, OSError) as error:
        raise NotAuthorized(
            f"the keys in {signers} are not trusted: {error}",
            hint="give the file to root, and let nobody else write to it",
        ) from error
    if size > _MOST_SIGNERS:
        raise NotAuthorized(f"{signers} is larger than {human_bytes(_MOST_SIGNERS)}", hint=hint)


def _name(user: int) -> str:
    """Return the name of a user, for which a key is listed."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError as error:
        raise NotAuthorized(
            f"for whom keys are listed is not known: uid {user} has no entry in the user database",
            hint="import the image as root with --trust",
        ) from error
