"""A measurement kept between starts: for one model, flags, release, torch, driver and card."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import msgspec
from kvarena.errors import KvArenaError
from kvarena.plugin.engines.sglang.measure.errors import ProfileError
from kvarena.plugin.engines.sglang.measure.steps import StepShape
from kvarena.pool.reserve import MeasuredStep
from kvarena.transfer.owner_only import check_directory, write_atomically

__all__ = ["Profile", "ProfileStore", "flags_of"]

_FORMAT = 1
_MAX_BYTES = 1 << 20
#: Arguments that change from start to start, or say nothing about memory.
_NOT_FLAGS = frozenset({
    "host", "port", "nccl_port", "dist_init_addr", "random_seed", "api_key", "admin_api_key", "log_level",
    "log_level_http", "served_model_name", "node_rank", "base_gpu_id", "disaggregation_bootstrap_port",
    "ssl_keyfile", "ssl_certfile", "ssl_keyfile_password", "gpu_id_step", "watermark_key", "watermark_key_b",
})  # fmt: skip


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    nbytes: int
    requests: int


@final
class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What was measured, and where.

    Attributes
    ----------
    key : dict
        What it holds for; anything else is measured anew.
    steps : list
        As measured.
    unseen_bytes : int
        What the steps took for good: a start that does not run them takes it when requests do.
    """

    format: int
    key: dict[str, str]
    steps: list[_Step]
    unseen_bytes: int
    digest: str = ""

    @classmethod
    def of(cls, key: Mapping[str, str], steps: Sequence[MeasuredStep], unseen_bytes: int) -> Profile:
        """Made from a measurement."""
        made = cls(
            format=_FORMAT,
            key=dict(key),
            steps=[_Step(step.name, step.nbytes, step.requests) for step in steps],
            unseen_bytes=unseen_bytes,
        )
        return msgspec.structs.replace(made, digest=made._digest())

    def measured(self) -> list[MeasuredStep]:
        """The kept peaks as the steps that they were measured of."""
        return [MeasuredStep(step.name, step.nbytes, step.requests) for step in self.steps]

    def _digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(self, digest=""))).hexdigest()

    def check(self, key: Mapping[str, str], shapes: Sequence[StepShape], device_bytes: int) -> None:
        """Hold what a file says against what can be.

        Raises
        ------
        ProfileError
            It was changed, is for another server, or says what no measurement can.
        """
        if self.digest != self._digest():
            raise ProfileError("it was changed after it was written (its digest differs).")
        if self.key != dict(key):
            names = sorted(name for name in {*self.key, *key} if self.key.get(name) != key.get(name))
            raise ProfileError(f"it is for another server: {', '.join(names)} differ.")
        wanted = {(shape.name, shape.requests) for shape in shapes}
        kept = {(step.name, step.requests) for step in self.steps}
        if not wanted <= kept:
            raise ProfileError(f"it lacks {sorted(wanted - kept)}.")
        figures = [step.nbytes for step in self.steps] + [self.unseen_bytes]
        figures += [step.requests for step in self.steps]
        if any(not 0 <= figure <= device_bytes for figure in figures):
            raise ProfileError(f"it says figures that a device of {device_bytes} bytes cannot give.")


@final
class ProfileStore:
    """A directory of profiles that only its user can enter.

    Parameters
    ----------
    directory : path
        Made with mode 0700 if it is not there.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)

    def path_of(self, key: Mapping[str, str]) -> Path:
        """Where a server's profile lies."""
        name = hashlib.sha256(msgspec.json.encode(sorted(key.items()))).hexdigest()
        return self.directory / f"{name[:32]}.profile.json"

    def load(self, key: Mapping[str, str], shapes: Sequence[StepShape], device_bytes: int) -> Profile | None:
        """The profile for this server; None: there is none.

        Raises
        ------
        ProfileError
            There is one that cannot be trusted; the error names the file and says why.
        """
        path = self.path_of(key)
        try:
            if not self.directory.exists():
                return None
            self._check_directory(create=False)
            contents = _contents(path)
        except FileNotFoundError:
            return None
        except (OSError, KvArenaError) as error:
            raise _refused(path, getattr(error, "strerror", None) or str(error)) from error
        try:
            profile = msgspec.json.decode(contents, type=Profile)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _refused(path, f"it is cut off, or not a profile ({error}).") from error
        try:
            if profile.format != _FORMAT:
                raise ProfileError(f"its format is {profile.format}, this kvarena reads {_FORMAT}.")
            profile.check(key, shapes, device_bytes)
        except ProfileError as error:
            raise _refused(path, error.what) from error
        return profile

    def save(self, profile: Profile) -> Path:
        """Replace the file of this server as a whole.

        Raises
        ------
        ProfileError
            The directory is not ours alone, or the disk does not take it.
        """
        path = self.path_of(profile.key)
        try:
            self._check_directory(create=True)
            write_atomically(path, msgspec.json.encode(profile))
        except (OSError, KvArenaError) as error:
            raise ProfileError(
                f"the measurement cannot be kept in {path}: {error}", fix="Change KVARENA_PROFILE_DIR."
            ) from error
        return path

    def _check_directory(self, *, create: bool) -> None:
        check_directory(self.directory, create=create)


def flags_of(server_args: Any) -> dict[str, str]:
    """The server's arguments as resolved, but for those that say nothing about memory.

    Parameters
    ----------
    server_args : ServerArgs
        SGLang's.
    """
    told = server_args.resolved_dict() if hasattr(server_args, "resolved_dict") else vars(server_args)
    return {
        name: repr(value)
        for name, value in sorted(told.items())
        if not name.startswith("_") and name not in _NOT_FLAGS
    }


def _contents(path: Path) -> bytes:
    # Neither a link to somewhere else, nor a pipe that would make the reader wait.
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_size > _MAX_BYTES:
            raise ProfileError("it is not a file of a few KiB.")
        if about.st_uid != os.geteuid():
            raise ProfileError(f"it belongs to user {about.st_uid}.")
        if about.st_mode & 0o022:
            raise ProfileError("others can write to it.")
        return file.read(_MAX_BYTES)


def _refused(path: Path, why: str) -> ProfileError:
    return ProfileError(f"the kept measurement {path} is not used: {why.rstrip('.')}.", fix="Remove it.")
