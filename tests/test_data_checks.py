"""Malformed rows are named before a model is loaded."""

import pytest
from datasets import Dataset, IterableDataset

from trl_fsdp_qlora.data_checks import check_rows, has_images, read_json_rows

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def user(content):
    return {"role": "user", "content": content}


@pytest.mark.parametrize(
    "rows",
    [
        {"messages": [[USER, ANSWER]]},
        {"conversations": [[{"from": "user", "value": "a"}, {"from": "assistant", "value": "b"}]]},
        {"prompt": ["a"], "completion": ["b"]},
        {"prompt": [[USER]], "completion": [[ANSWER]]},
        {"prompt": ["", "a"], "completion": ["b", ""]},
        {"text": ["a b"]},
        {"input_ids": [[1, 2]]},
        {"messages": [[user([{"type": "image", "text": None}, {"type": "text", "text": "a"}]), ANSWER]]},
        {"messages": [[user([{"type": kind}]), ANSWER] for kind in ("image", "image_url", "audio", "input_audio", "video")]},
        {"messages": [[USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "f"}}]}]]},
    ],
)
def test_good_rows(rows):
    check_rows(Dataset.from_dict(rows, on_mixed_types="use_json"), "train_dataset")


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
        ({"text": [[USER]]}, ["Row 0", "must be a string, not list"]),
        ({"text": ["a", "", ""]}, ["Row 1", "'text' is empty", "filter(lambda row: row['text'])"]),
        ({"prompt": ["a", ""], "completion": ["", ""]}, ["Row 1", "'prompt' and 'completion' are empty", "row['completion']"]),
        ({"prompt": ["a"], "completion": [[ANSWER]]}, ["Row 0", "one is a string and the other a list"]),
        ({"messages": [[USER], [user("")]]}, ["Row 1", "no message with any content"]),
        # The text of all of these is left out by the chat template, or written as Python writes it.
        ({"messages": [[user([{"type": "text", "text": "a"}])], [user([{"text": "b"}])]]}, ["Row 1", "without a 'type'"]),
        ({"messages": [[user([{"text": "a"}])]]}, ["Row 0", "message 0", "{'text': 'a'}", "without a 'type'", "{'type': 'text'"]),
        ({"messages": [[user(["a"])]]}, ["Row 0", "message 0", "'a' for a part", "without a 'type'"]),
        ({"messages": [[user([{"type": "txt", "text": "a"}])]]}, ["Row 0", "message 0", "the type 'txt'", "image, image_url, audio"]),
        ({"messages": [[user([{"type": "text", "content": "a"}])]]}, ["Row 0", "message 0", "without a string as 'text'"]),
        ({"messages": [[user([{"type": "text", "text": None}])]]}, ["Row 0", "message 0", "without a string as 'text'"]),
        ({"messages": [[user({"text": "a"})]]}, ["Row 0", "message 0", "content is {'text': 'a'}", "write a string, or a list"]),
        ({"messages": [[user(5)]]}, ["Row 0", "message 0", "content is 5"]),
        ({"conversations": [[{"from": "user", "value": {"text": "a"}}]]}, ["Row 0", "'conversations'", "content is {'text': 'a'}"]),
        ({"prompt": [[USER]], "completion": [[{"role": "assistant", "content": [{"text": "b"}]}]]}, ["'completion'", "without a 'type'"]),
    ],
)
def test_bad_rows_are_named(rows, said):
    with pytest.raises(ValueError) as error:
        check_rows(Dataset.from_dict(rows), "train_dataset")
    assert all(part in str(error.value) for part in said), error.value


def test_what_a_tool_returned_may_be_an_object():
    row = [USER, {"role": "tool", "content": {"sky": "blue"}}, ANSWER]
    check_rows(Dataset.from_dict({"messages": [row]}, on_mixed_types="use_json"), "train_dataset")


def test_streams_are_looked_into():
    def stream(*rows):
        return IterableDataset.from_generator(lambda: iter(rows))

    check_rows(stream({"messages": [USER, ANSWER]}, {"messages": None}), "train_dataset")
    for rows, said in (
        ((), "`train_dataset` has no rows"),
        (({"question": "a"},), "has the columns question, and nothing to train on"),
        (({"text": ""},), "Row 0 .* 'text' is empty"),
        (({"messages": [user({"text": "a"})]},), "Row 0 .* message 0 whose content is"),
    ):
        with pytest.raises(ValueError, match=said):
            check_rows(stream(*rows), "train_dataset")


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
