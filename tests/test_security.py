"""Files that others may have made are data: they run no code, and their size in memory is bounded."""

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from xscale import deepspeed_private as private
from xscale.data.remote import locked
from xscale.errors import UserError, redact, redact_and_escape
from xscale.record import parse_tar_sample
from xscale.strict_yaml import parse_yaml

SECRET = "https://me:secret@host.org:80/corpus/a.tar?signature=secret"


class Code:
    """Makes a folder as it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_has_only_known_types(tmp_path: Path) -> None:
    private.register_plain_zero_stage_pickling()
    scaler = DynamicLossScaler(2**16, 100, 1.0, 1, False)
    state = {"scaler": scaler, "stage": ZeroStageEnum.gradients, "at": fragment_address(3, 4), "w": torch.ones(3)}
    torch.save(state, tmp_path / "known.pt")
    loaded = private.load_checkpoint_file(tmp_path / "known.pt")
    assert vars(loaded["scaler"]) == vars(scaler) and loaded["stage"] is ZeroStageEnum.gradients
    assert loaded["at"] == fragment_address(3, 4) and loaded["w"].equal(torch.ones(3))


@pytest.mark.parametrize("weights_only", [True, False])
def test_code_in_a_checkpoint_is_not_run_by_any_load(tmp_path: Path, weights_only: bool) -> None:
    """weights_only=False: as DeepSpeed loads its files."""
    torch.save({"x": Code(tmp_path / "owned")}, tmp_path / "code.pt")
    with pytest.raises(pickle.UnpicklingError), private.loading_known_types_only():
        torch.load(tmp_path / "code.pt", weights_only=weights_only)
    assert not (tmp_path / "owned").exists()


def sparse(tar: tarfile.TarFile) -> None:
    member = tarfile.TarInfo("a.en.txt")
    member.size = 1
    member.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": str(2 << 30), "GNU.sparse.name": "a.en.txt"}
    tar.addfile(member, io.BytesIO(b"x"))


def link(kind: bytes) -> Callable[[tarfile.TarFile], None]:
    def add(tar: tarfile.TarFile) -> None:
        member = tarfile.TarInfo("a.en.txt")
        member.type = kind
        member.linkname = "a.en.txt"
        tar.addfile(member)

    return add


@pytest.mark.parametrize("add", [sparse, link(tarfile.SYMTYPE), link(tarfile.LNKTYPE)], ids=["sparse", "link", "hard"])
def test_a_sample_is_its_own_bytes(add: Callable[[tarfile.TarFile], None]) -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as tar:
        add(tar)
    assert len(content.getvalue()) < 20_000
    with pytest.raises(ValueError, match=r"member a\.en\.txt is a link, a device or a sparse"):
        parse_tar_sample(content.getvalue(), ("en",))


def test_aliases_of_aliases_are_refused() -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for number in range(1, 9):
        aliases = ", ".join([f"*a{number - 1}"] * 9)
        lines.append(f"a{number}: &a{number} [{aliases}]")
    with pytest.raises(ValueError, match=r"more than 10 aliases") as error:
        parse_yaml("\n".join(lines))
    assert len(str(error.value)) < 200
    assert parse_yaml("a: &a {b: 1}\nc: *a") == {"a": {"b": 1}, "c": {"b": 1}}


@pytest.mark.parametrize("digits", [301, 5000])
def test_a_number_of_many_digits_is_shown_by_its_first(digits: int) -> None:
    with pytest.raises(ValueError, match=rf"the number 11111111111111111111... has {digits:,} digits") as error:
        parse_yaml(f"a: {'1' * digits}")
    assert len(str(error.value)) < 200
    assert parse_yaml(f"'{'1' * digits}'") == "1" * digits and parse_yaml("1" * 300) == int("1" * 300)


@pytest.mark.parametrize("show", [redact, redact_and_escape, lambda text: str(UserError(text))])
def test_secrets_of_urls_are_not_shown(show: Callable[[str], str]) -> None:
    shown = show(f"error: {SECRET}, s3://bucket/b.tar (`{SECRET}`)")
    assert "secret" not in shown and "me" not in shown
    assert "https://***@host.org:80/corpus/a.tar?***" in shown and "s3://bucket/b.tar" in shown


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("of the user")
    (tmp_path / "lock").symlink_to(tmp_path / "file")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / "lock"):
        pass
    assert (tmp_path / "file").read_text() == "of the user"
