"""A checkpoint that is not exactly what its configuration says is refused, and the fault is named."""

from __future__ import annotations

import json
import logging
import os
import shutil

import pytest
import torch

from samebit.core.errors import CheckpointError
from samebit.kernels.selection import select_kernels
from samebit.models.base import load_model
from samebit.models.checkpoint import Checkpoint
from tests.models import tiny
from tests.models.driver import chunked_logits

WK = "model.llm.layers.2.attn.wk_dv.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="session")
def sharded(mixed_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    tiny.save_published(mixed_model, folder, max_shard_size="20KB")
    return folder


@pytest.fixture
def shards(sharded, tmp_path):
    """A copy of the sharded checkpoint to break."""
    return shutil.copytree(sharded, tmp_path / "shards")


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("name", [WK, "model.llm.embed.weight", "model.llm.layers.1.mlp.gate.bias"])
def test_a_missing_tensor_is_named(name, folder, load):
    tiny.edit_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is missing"):
        load(folder)


@pytest.mark.parametrize("name", ["model.llm.layers.4.attn_norm.weight", "model.llm.head.bias", "lm_head.weight"])
def test_an_unknown_tensor_is_named(name, folder, load):
    tiny.edit_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=f"tensor '{name}' is unknown"):
        load(folder)


@pytest.mark.parametrize("shape", [(32, 16), (16, 31), (512,), (1, 16, 32)])
def test_a_misshapen_tensor_is_named_with_both_shapes(shape, folder, load):
    tiny.edit_tensors(folder, lambda tensors: tensors.update({WK: torch.zeros(shape)}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(caught.value) == f"tensor '{WK}' has shape {list(shape)}, expected [16, 32]"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float64, torch.float8_e4m3fn])
def test_a_wrong_dtype_is_named(dtype, folder, load):
    tiny.edit_tensors(folder, lambda tensors: tensors.update({WK: torch.zeros(16, 32).to(dtype)}))
    with pytest.raises(CheckpointError, match=f"tensor '{WK}' has dtype .*, expected one of BF16, F16, F32"):
        load(folder)


def test_a_scalar_may_have_no_dimension(folder, pristine, load):
    def flatten(tensors):
        for name in tensors:
            if name.endswith("global_scale"):
                tensors[name] = tensors[name].squeeze()

    ids = tiny.token_ids(6)
    tiny.edit_tensors(folder, flatten)
    assert torch.equal(chunked_logits(load(folder), ids, []), chunked_logits(load(pristine), ids, []))


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.999])
def test_a_truncated_file_is_named(kept, folder, load):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a complete safetensors file"):
        load(folder)


@pytest.mark.parametrize("header", [b"\xff" * 8, b"\x08" + b"\0" * 7 + b"{]}}}}}}"])
def test_a_corrupt_header_is_named(header, folder, load):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(header + data[len(header) :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: is not a complete safetensors file"):
        load(folder)


def test_a_missing_shard_is_named(shards, load):
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=f"{victim.name}: listed in {INDEX} but missing"):
        load(shards)


def test_an_index_entry_without_its_tensor_is_named(shards, load):
    edit_index(shards, lambda where: where.update({"model.llm.extra": where[WK]}))
    with pytest.raises(CheckpointError, match=r"puts tensor 'model.llm.extra' in .*, which lacks it"):
        load(shards)


def test_a_tensor_that_the_index_leaves_out_is_named(shards, load):
    edit_index(shards, lambda where: where.pop(WK))
    with pytest.raises(CheckpointError, match=f"holds tensor '{WK}', which {INDEX} does not put there"):
        load(shards)


def test_an_index_cannot_point_out_of_its_folder(shards, load):
    edit_index(shards, lambda where: where.update({WK: "../model-00001.safetensors"}))
    with pytest.raises(CheckpointError, match="is not a plain file name"):
        load(shards)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'])
def test_an_index_without_a_map_is_refused(text, shards, load):
    (shards / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="weight_map must map tensor names to file names"):
        load(shards)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "must hold a JSON object"), ("\x80", "is not JSON")],
)
def test_a_broken_configuration_file_is_named(text, message, folder, load):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=rf"config\.json: {message}"):
        load(folder)


def test_a_folder_without_configuration_is_refused(tmp_path, load):
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(folder, load):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"has neither model\.safetensors nor {INDEX}"):
        load(folder)


@pytest.mark.parametrize("model_type", ["llama", None, 3, []])
def test_an_unknown_architecture_is_named(model_type, folder, load):
    tiny.edit_config(folder, lambda config: config.update(model_type=model_type))
    with pytest.raises(CheckpointError, match=r"model_type=.* is not one of inkling_mm_model, inkling_text"):
        load(folder)


def test_a_quantisation_file_is_refused(folder, load):
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config\.json: quantised checkpoints are not supported"):
        load(folder)


def test_skipped_parts_are_logged_once_each(folder, load, caplog):
    heads = {f"model.mtp.layers.{i}.hidden_norm.weight": torch.zeros(32) for i in range(3)}
    tiny.edit_tensors(folder, lambda tensors: tensors.update(heads))
    with caplog.at_level(logging.INFO, logger="samebit"):
        load(folder)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3
    assert [sum(kind in line for line in lines) for kind in ("3 draft heads", "vision", "2 audio")] == [1, 1, 1]


def test_weights_are_copies_of_the_file(folder, load):
    model = load(folder)
    ids = tiny.token_ids(6)
    before = chunked_logits(model, ids, [])
    with (folder / "model.safetensors").open("r+b") as file:
        header = 8 + int.from_bytes(file.read(8), "little")
        data = file.seek(0, os.SEEK_END) - header
        file.seek(header)
        file.write(b"\0" * data)
    assert torch.equal(chunked_logits(model, ids, []), before)


def test_weights_go_to_their_device_before_anything_is_done_to_them(pristine, monkeypatch, kernel_kind):
    taken, take = [], Checkpoint.take

    def noted(self, name, *device):
        taken.extend(device)
        return take(self, name, *device)

    monkeypatch.setattr(Checkpoint, "take", noted)
    there = torch.device("cpu", 0)  # the same, and yet another than the default
    load_model(pristine, select_kernels(kernel_kind, num_threads=1), there)
    assert len(taken) > 20
    assert set(taken) == {there}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_named_by_its_tensor(value, dtype, folder, load):
    def spoil(tensors):
        tensors[WK] = tensors[WK].to(dtype)
        tensors[WK].view(-1)[77] = value

    tiny.edit_tensors(folder, spoil)
    with pytest.raises(CheckpointError, match=f"tensor '{WK}' has values that are not finite"):
        load(folder)


def test_values_whose_sum_is_too_large_are_served(folder, load):
    tiny.edit_tensors(folder, lambda tensors: tensors[WK].fill_(3e38))
    load(folder)
