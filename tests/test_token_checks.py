"""Rows that are tokens already: what is wrong is found, however the column is stored, and named by row."""

import pytest
import torch
from datasets import Array2D, Dataset, Features, IterableDataset, Json, LargeList, List, Value

from trl_fsdp_qlora.data_checks import check_rows
from trl_fsdp_qlora.token_checks import BATCH_SIZE, check_token_rows

IDS = [[10, 11, 12], [13, 14]]


def refusal(dataset, vocabulary=300, **fields):
    with pytest.raises(ValueError) as error:
        check_rows(dataset, "train_dataset", **fields)
        check_token_rows(dataset, "train_dataset", vocabulary)
    return str(error.value)


@pytest.mark.parametrize(
    "rows",
    [
        {"input_ids": [[0, 299], [5]]},
        {"input_ids": IDS, "attention_mask": [[1, 1, 1], [1, 1]]},
        {"input_ids": IDS, "labels": [[-100, 11, 299], [-100, -100]]},
        {"input_ids": IDS, "assistant_masks": [[0, 1, 1], [False, True]]},
        {"input_ids": IDS, "question": [None, "anything else is not read"]},
    ],
)
def test_good_rows(rows):
    dataset = Dataset.from_list([{name: values[i] for name, values in rows.items()} for i in range(2)], on_mixed_types="use_json")
    stream = dataset.to_iterable_dataset()
    for stored in (dataset, dataset.with_format("torch"), stream, stream.with_format("numpy")):
        check_rows(stored, "train_dataset")
        check_token_rows(stored, "train_dataset", 300)


@pytest.mark.parametrize("kind", [LargeList(Value("uint16")), List(Value("int64"), length=2)], ids=["large", "fixed"])
def test_rows_in_other_lists(kind):
    dataset = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}, features=Features({"input_ids": kind}))
    check_token_rows(dataset, "train_dataset", 5)
    assert "Row 1" in refusal(dataset, 4)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({"input_ids": [7, 8]}, ["Row 0", "must be a list", "not 7"]),
        ({"input_ids": ["7 8"]}, ["Row 0", "must be a list", "not '7 8'"]),
        ({"input_ids": [[[7, 8]], [[9]]]}, ["Row 0", "whole numbers", "not [7, 8]"]),
        ({"input_ids": [[7.5, 8.0]]}, ["Row 0", "whole numbers", "not 7.5"]),
        ({"input_ids": [["7"]]}, ["Row 0", "whole numbers", "not '7'"]),
        ({"input_ids": [[True]]}, ["Row 0", "whole numbers", "not True"]),
        ({"input_ids": [[7, 8], [7, None]]}, ["Row 1", "whole numbers", "not None"]),
        ({"input_ids": [[7, 8], None]}, ["Row 1", "'input_ids' is missing"]),
        ({"input_ids": [[7, 8], []]}, ["Row 1", "'input_ids' is empty"]),
        ({"input_ids": [[]]}, ["Row 0", "'input_ids' is empty"]),
        ({"input_ids": [[7, 8], [7, -5]]}, ["Row 1", "has -5 at position 1"]),
        ({"input_ids": [[7, 8], [300, 7]]}, ["Row 1", "has 300 at position 0", "0 to 299"]),
        ({"input_ids": IDS, "labels": [[10, 11, 12], [13]]}, ["Row 1", "'labels' has 1 numbers for the 2 tokens"]),
        ({"input_ids": IDS, "labels": [[10, 11, 12], None]}, ["Row 1", "'labels' is missing"]),
        ({"input_ids": IDS, "labels": [[10, 11, 300], [13, 14]]}, ["Row 0", "has 300 at position 2", "-100 stands for"]),
        ({"input_ids": IDS, "labels": [[10, 11, 12], [13, -1]]}, ["Row 1", "has -1 at position 1"]),
        ({"input_ids": IDS, "assistant_masks": [[0, 1], [0, 1]]}, ["Row 0", "'assistant_masks' has 2 numbers for the 3 tokens"]),
        ({"input_ids": IDS, "assistant_masks": [[0, 1, 1], [0, -100]]}, ["Row 1", "has -100 at position 1"]),
        ({"input_ids": IDS, "attention_mask": [[1, 1, 1], [1, 0]]}, ["Row 1", "has 0 at position 1", "padding"]),
    ],
)
def test_bad_rows_are_named(rows, said):
    dataset = Dataset.from_dict(rows)
    message = refusal(dataset)
    assert all(part in message for part in said), message
    if "Row 0" in said and "labels" not in rows:  # a stream is not read ahead, but it is looked into
        assert refusal(IterableDataset.from_generator(dataset.to_list)) == message


def test_bad_rows_far_behind_others_and_out_of_order():
    rows = [[7, 8]] * (2 * BATCH_SIZE + 5)
    rows[2 * BATCH_SIZE + 3] = [7, 300]
    assert f"Row {2 * BATCH_SIZE + 3} of" in refusal(Dataset.from_dict({"input_ids": rows}))
    assert "Row 1 of" in refusal(Dataset.from_dict({"input_ids": rows}).select([0, 2 * BATCH_SIZE + 3]))


def test_columns_of_other_types():
    mixed = Dataset.from_dict({"input_ids": [[1, 2], 5]}, on_mixed_types="use_json")
    assert isinstance(mixed.features["input_ids"], Json) and "Row 1" in refusal(mixed) and "not 5" in refusal(mixed)
    nested = Dataset.from_dict({"input_ids": [[[1, 2]]]}, features=Features({"input_ids": Array2D((1, 2), "int32")}))
    assert "Row 0" in refusal(nested) and "[1, 2]" in refusal(nested)
    tensors = IterableDataset.from_generator(lambda: iter([{"input_ids": torch.tensor([1, 2])}]))
    check_rows(tensors, "train_dataset")
    assert "has 2 at position 1" in refusal(tensors, 2)


MASKED = {"input_ids": IDS, "completion_mask": [[0, 1, 1], [0, 1]]}
TEXTS = {"prompt": ["a", "b"], "completion": ["c", "d"]}


@pytest.mark.parametrize(
    ("rows", "fields", "said"),
    [
        (MASKED, {}, ["'completion_mask'", "`completion_only_loss=True`", "False"]),
        (MASKED, {"completion_only_loss": True}, None),
        (MASKED, {"completion_only_loss": False}, None),
        ({**MASKED, **TEXTS}, {}, None),
        ({**MASKED, "labels": IDS}, {"completion_only_loss": True}, ["'labels'", "'completion_mask' would not be read"]),
        ({"input_ids": IDS, "labels": IDS, "assistant_masks": IDS}, {}, ["'labels'", "'assistant_masks' would not be read"]),
        ({"input_ids": IDS, "labels": IDS}, {"completion_only_loss": True, "assistant_only_loss": True}, None),
        ({"input_ids": IDS}, {"completion_only_loss": True}, ["`completion_only_loss=True`", "no 'completion_mask'"]),
        (MASKED, {"completion_only_loss": True, "assistant_only_loss": True}, ["`assistant_only_loss=True`", "no 'assistant_masks'"]),
        ({"text": ["a", "b"], "labels": [0, 1]}, {}, ["'labels' but no 'input_ids'"]),
        ({**TEXTS, "completion_mask": [[0], [1]]}, {}, ["'completion_mask' but no 'input_ids'"]),
        ({"text": ["a", "b"]}, {"completion_only_loss": True}, ["`completion_only_loss=True`", "'prompt' and 'completion'"]),
        (TEXTS, {"completion_only_loss": True}, None),
    ],
)
def test_masks_are_read_or_refused(rows, fields, said):
    for dataset in (Dataset.from_dict(rows), IterableDataset.from_generator(Dataset.from_dict(rows).to_list)):
        if said is None:
            check_rows(dataset, "train_dataset", **fields)
        else:
            message = refusal(dataset, **fields)
            assert all(part in message for part in said), message
