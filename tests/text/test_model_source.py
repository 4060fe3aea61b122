import json

import pytest

from samebit.core.errors import CheckpointError, ModelNotFoundError
from samebit.engine.model_source import (
    GenerationDefaults,
    read_generation_defaults,
    resolve_model,
)


def test_the_bundled_model_is_complete():
    folder = resolve_model("nano")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for name in {
        *index["weight_map"].values(),
        *("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("generation_config.json", "README.md"),
    }:
        assert (folder / name).is_file(), name


def test_a_folder_is_its_own_source(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize("name", ["nanoo", "a/b/c", "../up", ""])
def test_a_name_of_no_known_form_is_refused_with_what_was_tried(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="model"):
        resolve_model(name)


def test_a_hub_model_that_cannot_be_fetched_says_why(monkeypatch):
    import huggingface_hub

    def fail(name, **_):
        raise OSError("no route to the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelNotFoundError, match=r"org/model.*no route to the hub"):
        resolve_model("org/model")


def write(folder, name, **values):
    (folder / name).write_text(json.dumps(values))


def test_generation_defaults_come_from_the_generation_configuration(tmp_path):
    write(tmp_path, "config.json", eos_token_id=3)
    write(tmp_path, "generation_config.json", eos_token_id=[5, 7, 5], temperature=1, top_k=40)
    assert read_generation_defaults(tmp_path) == GenerationDefaults(eos_token_ids=(5, 7), temperature=1.0, top_k=40)


@pytest.mark.parametrize("nested", [False, True])
def test_end_tokens_are_found_in_the_model_configuration(tmp_path, nested):
    values = {"eos_token_id": 0}
    write(tmp_path, "config.json", **({"text_config": values} if nested else values))
    assert read_generation_defaults(tmp_path) == GenerationDefaults(eos_token_ids=(0,))


def test_a_checkpoint_that_does_not_sample_is_greedy(tmp_path):
    write(tmp_path, "generation_config.json", do_sample=False, temperature=0.7)
    assert read_generation_defaults(tmp_path).temperature == 0.0


@pytest.mark.parametrize("values", [{"eos_token_id": "2"}, {"temperature": "hot"}, {"top_k": 1.5}, {"top_p": True}])
def test_a_value_of_the_wrong_type_is_refused_by_name(tmp_path, values):
    write(tmp_path, "generation_config.json", **values)
    with pytest.raises(CheckpointError, match=next(iter(values))):
        read_generation_defaults(tmp_path)


def test_a_file_that_is_not_a_json_object_is_refused(tmp_path):
    for content in ("[", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read_generation_defaults(tmp_path)
