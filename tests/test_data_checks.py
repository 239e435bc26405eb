"""Malformed rows are named before a model is loaded."""

import pytest
from datasets import Dataset, IterableDataset

from trl_fsdp_qlora.data_checks import check_rows, has_images, read_json_rows

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "rows",
    [
        {"messages": [[USER, ANSWER]]},
        {"conversations": [[{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]]},
        {"prompt": ["a"], "completion": ["b"]},
        {"prompt": [[USER]], "completion": [[ANSWER]]},
        {"text": ["a b"]},
        {"input_ids": [[1, 2]]},
    ],
)
def test_good_rows(rows):
    check_rows(Dataset.from_dict(rows), "train_dataset")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"text": []}, ["no rows"]),
        ({"question": ["a"]}, ["question", "'messages'", "'text'"]),
        ({"prompt": ["a"]}, ["prompt", "'completion'"]),
        ({"text": ["a", None]}, ["Row 1", "'text' is missing"]),
        ({"prompt": ["a", "b", None], "completion": ["a", "b", "c"]}, ["Row 2", "'prompt'"]),
        ({"messages": [[USER, ANSWER], []]}, ["Row 1", "empty list"]),
        ({"messages": ["hello"]}, ["Row 0", "not a string"]),
        ({"messages": [[{"role": "user", "text": "a"}]]}, ["Row 0", "message 0", "'content'"]),
        ({"messages": [[["user", "a"]]]}, ["Row 0", "message 0"]),
        ({"input_ids": [[1], []]}, ["Row 1", "empty"]),
        ({"text": [1.5]}, ["Row 0", "not float"]),
    ],
)
def test_bad_rows_are_named(rows, said):
    with pytest.raises(ValueError) as error:
        check_rows(Dataset.from_dict(rows), "train_dataset")
    assert all(part in str(error.value) for part in said), error.value


def test_missing_and_wrong_kinds():
    with pytest.raises(ValueError, match="`train_dataset` is missing"):
        check_rows(None, "train_dataset")
    with pytest.raises(TypeError, match="list"):
        check_rows([{"text": "a"}], "train_dataset")
    check_rows(IterableDataset.from_generator(lambda: iter([{"text": "a"}])), "train_dataset")


def test_images_are_seen_by_column():
    assert has_images(Dataset.from_dict({"images": [[]], "messages": [[USER]]}))
    assert not has_images(Dataset.from_dict({"text": ["a"]}))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no rows"),
        ('{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
        ('{"text": "a"}\n"b"\n', "row 2"),
        ('[{"text": "a"},\n {"text"}]', "line 2: not valid JSON"),
    ],
)
def test_bad_files_name_the_line(tmp_path, content, said):
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=said):
        read_json_rows(str(file))


def test_files(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "a"}\n\n{"text": "b"}\n')
    assert read_json_rows(str(file))["text"] == ["a", "b"]
    file.write_text('[{"text": "a"}]')
    assert len(read_json_rows(str(file))) == 1
    with pytest.raises(ValueError, match="does not exist"):
        read_json_rows(str(tmp_path / "none.jsonl"))
