"""Masks are compared with what a person would mark: the exact strings, piece by piece, that the model has to write."""

import json
import logging
from pathlib import Path

import pytest
import trl
from datasets import Dataset, IterableDataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from trl.chat_template_utils import get_training_chat_template

from trl_fsdp_qlora.chat_masks import add_assistant_masks, needs_rendered_masks, warn_once

TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja")}
GEMMA4 = sorted(name for name in TEMPLATES if name.startswith("gemma4"))
GEMMA4_TOOL_ROLE = [name for name in GEMMA4 if name != "gemma4_v2"]  # v2 makes a turn of its own of a tool's message
LATEST = TEMPLATES["gemma4_v5"]
SPECIAL = "<pad> <eos> <bos> <|turn> <turn|> <|think|> <|channel> <channel|> <|tool> <tool|> <|tool_call> <tool_call|> <|tool_response>"
SPECIAL = f'{SPECIAL} <tool_response|> <|"|> <|image> <image|> <|image|> <|audio> <audio|> <|audio|> <|im_start|> <|im_end|> <|user|>'
SPECIAL = f"{SPECIAL} <|assistant|> <|end|> <|start_header_id|> <|end_header_id|> <|eot_id|> <start_of_turn> <end_of_turn>".split()
CORPUS = ["What is the weather in Paris?\n\nIt is sunny.\nLet me think: call the tool.\n\n model\n\n user\n"] * 4

# Markers as a template's author would place them, and the same template without.
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def make_tokenizer(template: str | None, *, trim_offsets: bool = False, rstrip: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    special = [AddedToken(token, special=True, normalized=False, rstrip=token in rstrip) for token in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", chat_template=template
    )


def pieces(tokenizer, row: dict, mask: str = "assistant_masks") -> list[str]:
    """The text of each unbroken run of tokens that `mask` marks."""
    assert len(row["input_ids"]) == len(row[mask]) and set(row[mask]) <= {0, 1}
    runs, before = [], 0
    for token_id, bit in zip(row["input_ids"], row[mask], strict=True):
        if bit and not before:
            runs.append([])
        if bit:
            runs[-1].append(token_id)
        before = bit
    return [tokenizer.decode(run, clean_up_tokenization_spaces=False) for run in runs]


def mask_rows(template: str, rows: list[dict], tokenizer=None, **kwargs):
    """The pieces of each row, after a check that the tokens are those of `apply_chat_template`. Rows with ragged fields go as a stream."""
    tokenizer = tokenizer or make_tokenizer(template)
    out = list(add_assistant_masks(IterableDataset.from_generator(lambda: iter(rows)), tokenizer, **kwargs))
    for row, made in zip(rows, out, strict=True):
        messages = row["messages"] if "messages" in row else row["prompt"] + row["completion"]
        assert made["input_ids"] == tokenizer.apply_chat_template(
            messages, tools=row.get("tools"), return_dict=False, **row.get("chat_template_kwargs", {})
        )
    return [pieces(tokenizer, made) for made in out]


def mask(template: str, messages: list[dict], tokenizer=None, **row):
    return mask_rows(template, [{"messages": messages, **row}], tokenizer)[0]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def call(name="weather", **arguments):
    return [{"type": "function", "id": "1", "function": {"name": name, "arguments": arguments}}]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where"}}, "required": ["city"]},
        },
    }
]
RESPONSE = {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "sunny"}
CALLED = '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
SYSTEM = {"role": "system", "content": "Be brief."}


# Gemma 4, all templates that TRL ships


@pytest.mark.parametrize("name", GEMMA4)
def test_gemma4_plain_token_by_token(name):
    tokenizer = make_tokenizer(TEMPLATES[name])
    (row,) = add_assistant_masks(Dataset.from_list([{"messages": [user("Is it sunny?"), assistant("It is.")]}]), tokenizer)
    text = "<bos><|turn>user\nIs it sunny?<turn|>\n<|turn>model\nIt is.<turn|>\n"
    assert tokenizer.decode(row["input_ids"], clean_up_tokenization_spaces=False) == text
    tokens = [tokenizer.decode([token_id]) for token_id in row["input_ids"]]
    marked = [token for token, bit in zip(tokens, row["assistant_masks"], strict=True) if bit]
    assert len(marked) > 2 and "".join(marked) == "It is.<turn|>" and marked[-1] == "<turn|>"
    first = row["assistant_masks"].index(1)
    assert tokens[first - 1] == "\n" and tokens[-1] == "\n" and row["assistant_masks"][-1] == 0
    assert row.keys() == {"input_ids", "assistant_masks"}


@pytest.mark.parametrize("name", GEMMA4)
def test_gemma4_turns_system_and_content_lists(name):
    turns = [user("Hi"), assistant("Hello there."), user("Is it sunny?"), assistant("  It is.\n\nYes.\n")]
    expected = ["Hello there.<turn|>", "It is.\n\nYes.<turn|>"]  # the template trims
    as_lists = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
    got = mask_rows(TEMPLATES[name], [{"messages": m} for m in (turns, [SYSTEM, *turns], as_lists, [*turns, user("Bye")])])
    assert got == [expected] * 4


@pytest.mark.parametrize("name", GEMMA4)
def test_gemma4_thinking_prompt(name):
    turns = [SYSTEM, user("Hi"), assistant("Hello."), user("Sunny?"), assistant("Yes.")]
    assert mask(TEMPLATES[name], turns, chat_template_kwargs={"enable_thinking": True}) == ["Hello.<turn|>", "Yes.<turn|>"]


@pytest.mark.parametrize("name", GEMMA4_TOOL_ROLE)
def test_gemma4_tool_calls_without_the_responses(name):
    turns = [user("Paris?"), assistant("", tool_calls=call(city="Paris")), RESPONSE, assistant("It is sunny.")]
    assert mask(TEMPLATES[name], turns, tools=TOOLS) == [CALLED + "<|tool_response>", "It is sunny.<turn|>"]
    # tools as JSON text, and a call as the row's last message
    assert mask_rows(TEMPLATES[name], [{"messages": turns[:2], "tools": TOOLS}]) == [[CALLED + "<|tool_response>"]]
    tokenizer = make_tokenizer(TEMPLATES[name])
    both = [
        next(iter(add_assistant_masks(Dataset.from_list([{"messages": turns, "tools": t}]), tokenizer))) for t in (TOOLS, json.dumps(TOOLS))
    ]
    assert both[0] == both[1] and "declaration:weather" in tokenizer.decode(both[0]["input_ids"])


@pytest.mark.parametrize("name", GEMMA4_TOOL_ROLE)
def test_gemma4_chain_of_calls_with_thoughts(name):
    calls = [assistant("", tool_calls=call(city=city), reasoning_content=f"Try {city}") for city in ("Paris", "Rome")]
    turns = [user("Where?"), calls[0], RESPONSE, calls[1], {**RESPONSE, "content": "rain"}, assistant("Paris.")]
    thought = "<|channel>thought\nTry {0}\n<channel|>"
    expected = [thought.format("Paris") + CALLED, thought.format("Rome") + CALLED.replace("Paris", "Rome")]
    assert mask(TEMPLATES[name], turns) == [text + "<|tool_response>" for text in expected] + ["Paris.<turn|>"]


def test_gemma4_thought_of_the_last_answer():
    turns = [user("Hi"), assistant("Hello."), user("Sunny?"), assistant("Yes.", reasoning_content="Look out.")]
    expected = ["Hello.<turn|>", "<|channel>thought\nLook out.\n<channel|>Yes.<turn|>"]
    for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False}):
        assert mask(LATEST, turns, chat_template_kwargs=kwargs) == expected


def test_gemma4_thinking_goes_on_after_a_tool():
    """The latest template opens the thought itself after a tool's response: the opening is not the model's."""
    final = assistant("It is sunny.", reasoning_content="So it is.")
    turns = [user("Paris?"), assistant("", tool_calls=call(city="Paris"), reasoning_content="Ask."), RESPONSE, final]
    got = mask(LATEST, turns, chat_template_kwargs={"enable_thinking": True})
    first = "<|channel>thought\nAsk.\n<channel|>" + CALLED + "<|tool_response>"
    assert got == [first, "So it is.\n<channel|>It is sunny.<turn|>"]


@pytest.mark.parametrize("name", GEMMA4_TOOL_ROLE)
def test_gemma4_tool_responses_inside_the_message(name):
    responses = {"tool_calls": call(city="Paris"), "tool_responses": [{"name": "weather", "response": {"sky": "sunny"}}]}
    assert mask(TEMPLATES[name], [user("Paris?"), assistant("It is sunny.", **responses)]) == [
        CALLED + "<|tool_response>",
        "It is sunny.<turn|>",
    ]
    apart = [user("Paris?"), assistant("", **responses), assistant("It is sunny.")]
    assert mask(TEMPLATES[name], apart) == [CALLED + "<|tool_response>", "It is sunny.<turn|>"]


def test_gemma4_release_template_with_tools():
    turns = [user("Paris?"), assistant("", tool_calls=call(city="Paris")), RESPONSE, assistant("It is sunny.")]
    assert mask(TEMPLATES["gemma4_v2"], turns, tools=TOOLS) == [CALLED + "<turn|>", "It is sunny.<turn|>"]
    inside = assistant("Sunny.", tool_calls=call(city="Paris"), tool_responses=[{"name": "weather", "response": "sunny"}])
    with pytest.raises(ValueError, match=r"Row 0: message 1 \(assistant\): the chat template changes it when later messages follow"):
        mask(TEMPLATES["gemma4_v2"], [user("Paris?"), inside])


def test_generation_prompt_with_an_empty_thought():
    """As in Gemma 4 31B. The text is exact, and the difference between training and generation is told, once."""
    warn_once.cache_clear()
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    template = LATEST.replace("{{- '<|turn>model\\n' -}}", "{{- '<|turn>model\\n<|channel>thought\\n<channel|>' -}}")
    assert template != LATEST
    turns = [user("Hi"), assistant("Hello."), user("Sunny?"), assistant("Yes.")]
    logger = logging.getLogger("trl_fsdp_qlora.chat_masks")
    logger.addHandler(handler)
    try:
        assert mask_rows(template, [{"messages": turns}] * 2) == [["Hello.<turn|>", "Yes.<turn|>"]] * 2
    finally:
        logger.removeHandler(handler)
    assert len(warnings) == 1 and r"end in '<|channel>thought\n<channel|>'" in warnings[0] and "rows to train on" in warnings[0]


def test_processor_with_gemma4_template():
    """Gemma 4's own processor needs torchvision; what counts here is that a processor batches, and wants lists as content."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = make_tokenizer(None)
    processor = LlavaProcessor(CLIPImageProcessorPil(), tokenizer, chat_template=LATEST)
    assert needs_rendered_masks(processor)
    turns = [SYSTEM, user("Paris?"), assistant("", tool_calls=call(city="Paris")), RESPONSE, assistant("Sunny.")]
    row = {"prompt": turns[:2], "completion": turns[2:], "chat_template_kwargs": {"enable_thinking": False}}
    (made,) = add_assistant_masks(IterableDataset.from_generator(lambda: iter([row])), processor)
    assert pieces(tokenizer, made) == [CALLED + "<|tool_response>", "Sunny.<turn|>"]
    text = "<bos><|turn>system\nBe brief. <turn|>\n<|turn>user\nParis?<turn|>\n<|turn>model\n" + CALLED + "<|tool_response>"
    text += 'response:weather{value:<|"|>sunny<|"|>}<tool_response|>Sunny.<turn|>\n'
    assert tokenizer.decode(made["input_ids"], clean_up_tokenization_spaces=False) == text


# Both shapes of datasets


def test_prompt_and_completion():
    prompt, completion = [user("Hi"), assistant("Hello."), user("Sunny?")], [assistant("Yes."), user("Sure?"), assistant("Sure.")]
    row = {"prompt": prompt, "completion": completion, "number": 3}
    tokenizer = make_tokenizer(LATEST)
    dataset = add_assistant_masks(Dataset.from_list([row]), tokenizer)
    assert set(dataset.column_names) == {"input_ids", "assistant_masks", "completion_mask", "number"}
    assert pieces(tokenizer, dataset[0]) == ["Yes.<turn|>", "Sure.<turn|>"]
    whole = ["Yes.<turn|>\n<|turn>user\nSure?<turn|>\n<|turn>model\nSure.<turn|>\n"]
    assert pieces(tokenizer, dataset[0], "completion_mask") == whole
    everything = add_assistant_masks(Dataset.from_list([row]), tokenizer, completion_only=False)
    assert pieces(tokenizer, everything[0]) == ["Hello.<turn|>", "Yes.<turn|>", "Sure.<turn|>"]


def test_history_in_a_prompt_may_be_rewritten():
    prompt = [user("Hi"), assistant("Hello.", reasoning_content="Greet."), user("Sunny?")]
    row = {"prompt": prompt, "completion": [assistant("Yes.", reasoning_content="Look.")]}
    assert mask_rows(LATEST, [row]) == [["<|channel>thought\nLook.\n<channel|>Yes.<turn|>"]]
    with pytest.raises(ValueError, match=r"Row 0: message 1 \(assistant\): the chat template changes it"):
        mask_rows(LATEST, [row], completion_only=False)


def test_from_value_streams_and_worker_processes():
    rows = [{"conversations": [{"from": "user", "value": f"Number {i}?"}, {"from": "assistant", "value": f"{i}."}]} for i in range(4)]
    tokenizer = make_tokenizer(LATEST)
    expected = [[f"{i}.<turn|>"] for i in range(4)]
    for made in (
        add_assistant_masks(Dataset.from_list(rows), tokenizer, num_proc=2, desc="Masking"),
        add_assistant_masks(Dataset.from_list(rows).to_iterable_dataset(), tokenizer, num_proc=2),
    ):
        assert [pieces(tokenizer, row) for row in made] == expected
        assert all(row.keys() == {"input_ids", "assistant_masks"} for row in made)
    again = add_assistant_masks(made, tokenizer)
    assert again is made

    rows[3]["conversations"][1]["value"] = None
    rows[3]["conversations"][0]["value"] = None
    with pytest.raises(ValueError, match="Row 3: `messages"):
        add_assistant_masks(Dataset.from_list(rows), tokenizer, num_proc=2)


def test_trl_folds_the_masks_into_labels(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(LATEST)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    dataset = add_assistant_masks(Dataset.from_list([{"messages": [user("Hi"), assistant("Hello.")]}]), tokenizer)
    args = trl.SFTConfig(output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False)
    trainer = trl.SFTTrainer(model, args, train_dataset=dataset, processing_class=tokenizer)
    labels = trainer.train_dataset[0]["labels"]
    assert tokenizer.decode([label for label in labels if label != -100]) == "Hello.<turn|>"
    assert len(labels) == len(dataset[0]["input_ids"])


# Against markers, and templates of other families


def test_same_mask_as_markers():
    rows = [
        [user("Hi"), assistant("Hello.")],
        [SYSTEM, user("Hi"), assistant("Hello.\n\nYou?"), user("Good."), assistant("")],
        [user("Hi"), assistant("One."), assistant("Two."), user("End")],
    ]
    marked, unmarked = make_tokenizer(MARKED), make_tokenizer(UNMARKED)
    assert not needs_rendered_masks(marked) and needs_rendered_masks(unmarked)
    got = add_assistant_masks(Dataset.from_list([{"messages": row} for row in rows]), unmarked)
    for row, made in zip(rows, got, strict=True):
        expected = marked.apply_chat_template(row, return_dict=True, return_assistant_tokens_mask=True)
        assert made == {"input_ids": expected["input_ids"], "assistant_masks": expected["assistant_masks"]}


@pytest.mark.parametrize("name, line_break", [("llama3", False), ("gemma3", True)])
def test_same_mask_as_trls_training_template(name, line_break):
    """TRL's Gemma 3 markers also take in the line break behind the end of turn, which the model never writes."""
    tokenizer = make_tokenizer(TEMPLATES[name])
    assert not needs_rendered_masks(tokenizer)
    turns = [SYSTEM, user("Hi"), assistant("Hello."), user("Sunny?"), assistant("Yes.\n\nIt is.")]
    expected = tokenizer.apply_chat_template(
        turns, chat_template=get_training_chat_template(tokenizer), return_dict=True, return_assistant_tokens_mask=True
    )
    (made,) = add_assistant_masks(Dataset.from_list([{"messages": turns}]), tokenizer)
    assert made["input_ids"] == expected["input_ids"]
    assert [text + "\n" * line_break for text in pieces(tokenizer, made)] == pieces(tokenizer, expected)


def test_end_of_text_after_the_conversation_is_not_the_answers():
    turns = [user("Hi"), assistant("Hello."), user("Sunny?"), assistant("Yes.")]
    assert mask(TEMPLATES["phi3"], turns) == ["Hello.<|end|>", "Yes.<|end|>"]
    # an added token may swallow the white space behind it; it still closes the message
    assert mask(TEMPLATES["phi3"], turns, make_tokenizer(TEMPLATES["phi3"], rstrip=("<|end|>",))) == ["Hello.<|end|>", "Yes.<|end|>"]


def test_which_templates_need_it():
    assert all(needs_rendered_masks(make_tokenizer(TEMPLATES[name])) for name in GEMMA4)
    with pytest.raises(ValueError, match="no chat template"):
        needs_rendered_masks(make_tokenizer(None))


# Boundaries of tokens


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_white_space_at_the_boundary(trim_offsets):
    tokenizer = make_tokenizer(UNMARKED, trim_offsets=trim_offsets)
    assert "\n\n" in [tokenizer.decode([i]) for i in tokenizer("model\n\n user")["input_ids"]]
    assert mask(UNMARKED, [user("Hi"), assistant("\n Hello. \n\n you\n")], tokenizer) == [" Hello. \n\n you\n<|im_end|>"]
    assert mask(UNMARKED, [user("Hi"), assistant("Hello.")], tokenizer) == ["Hello.<|im_end|>"]
    assert mask(UNMARKED, [user("Hi"), assistant("é🙂")], tokenizer) == ["é🙂<|im_end|>"]  # several tokens for one character


@pytest.mark.parametrize("trim_offsets", [False, True])
def test_token_across_the_boundary_is_refused(trim_offsets):
    template = UNMARKED.replace("{{ m.role }}\n", "{{ m.role }}: ").replace("<|im_start|>assistant\n", "<|im_start|>assistant: ")
    with pytest.raises(ValueError, match="Row 0: message 1 .*token ' the' is half generation prompt"):
        mask(template, [user("Hi"), assistant("the tool")], make_tokenizer(template, trim_offsets=trim_offsets))


# What cannot be exact


def test_rewritten_history_is_refused():
    turns = [user("Hi"), assistant("Hello.", reasoning_content="Greet."), user("Sunny?"), assistant("Yes.")]
    with pytest.raises(ValueError) as error:
        mask_rows(LATEST, [{"messages": turns[2:]}, {"messages": turns}])
    text = str(error.value)
    assert text.startswith("Row 1: message 1 (assistant): the chat template changes it when later messages follow: '<|channel>thought")
    assert "has become 'Hello." in text and "`prompt`/`completion` rows" in text and "{% generation %}" in text

    moves_system = (
        "{% for m in messages %}{% if loop.last and m.role == 'user' %}<|user|>{{ messages|length }} turns{% endif %}"
        "<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    with pytest.raises(ValueError, match=r"Row 0: message 1 \(assistant\): the generation prompt before it is not in the whole row"):
        mask(moves_system, [user("Hi"), assistant("Hello.")])


def test_text_beside_a_tool_call_is_refused():
    """Gemma 4 puts it behind the tool's response, where the model could not have written it."""
    turns = [user("Paris?"), assistant("Let me look.", tool_calls=call(city="Paris")), RESPONSE, assistant("Sunny.")]
    for name in GEMMA4_TOOL_ROLE:
        with pytest.raises(ValueError, match=r"message 1 \(assistant\): .*'Let me look.* has become '<\|tool_response>response"):
            mask(TEMPLATES[name], turns)


def test_answers_in_a_row():
    """The older templates close each but write no header for the second; the latest makes one turn of them, which cannot be told apart."""
    for name in ("gemma4", "gemma4_v3", "gemma4_v4"):
        assert mask(TEMPLATES[name], [user("Hi"), assistant("One."), assistant("Two.")]) == ["One.<turn|>", "Two.<turn|>"]
    with pytest.raises(ValueError, match=r"message 1 \(assistant\): the chat template changes it"):
        mask(LATEST, [user("Hi"), assistant("One."), assistant("Two.")])


def test_message_that_nothing_closes_or_nothing_is_left_of():
    unclosed = UNMARKED.replace("<|im_end|>", "")
    with pytest.raises(ValueError, match="Row 0: message 1 .*no special token closes it.*Hello.'"):
        mask(unclosed, [user("Hi"), assistant("Hello.")])
    mute = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    with pytest.raises(ValueError, match="Row 0: message 1 .*leaves it no text"):
        mask(mute, [user("Hi"), assistant("Hello.")])


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [user("Hi")]}, "Row 1: no 'assistant' message to learn from in `messages`"),
        ({"messages": [user("Hi"), {"role": "gpt", "content": "Hello."}]}, r"Row 1: .*roles: \['gpt', 'user'\]"),
        ({"messages": None}, r"Row 1: `messages\[0\]` is None"),
        ({"messages": []}, r"Row 1: `messages\[0\]` is \[\]"),
        ({"messages": "Hi"}, r"Row 1: `messages\[0\]` is 'Hi'"),
        ({"messages": [{"role": None, "content": "Hi"}]}, r"Row 1: `messages\[0\]` is .*expected a message"),
        ({"messages": [user(None), assistant("Hello.")]}, r"Row 1: `messages\[0\]`"),
        ({"messages": [user([{"type": "image"}]), assistant("Hello.")]}, r"Row 1: `messages\[0\]` .*text `content`"),
        ({"messages": [assistant("Hello."), user("Hi")]}, "Row 1: message 0 .*the chat template cannot render 0 messages"),
        (
            {"messages": [user("Hi"), assistant("", tool_calls=[{"function": {"arguments": "x"}}])]},
            "Row 1: the chat template cannot render 2",
        ),
        ({"messages": [user("Hi"), assistant("Hello.")], "tools": "[{"}, "Row 1: "),
        ({"prompt": [user("Hi")], "completion": None}, r"Row 1: `completion\[0\]` is None"),
        ({"prompt": [user("Hi")], "completion": [user("Hello.")]}, "Row 1: no 'assistant' message .*in `completion`"),
    ],
)
def test_malformed_rows_are_named(row, message):
    good = (
        {"prompt": [user("Hi")], "completion": [assistant("Hello.")]} if "prompt" in row else {"messages": [user("Hi"), assistant("Hey.")]}
    )
    with pytest.raises(ValueError, match=message):
        list(add_assistant_masks(IterableDataset.from_generator(lambda: iter([good, row])), make_tokenizer(LATEST)))


def test_datasets_that_cannot_be_masked():
    tokenizer = make_tokenizer(LATEST)
    for dataset, message in [
        (Dataset.from_dict({"messages": []}), "no rows"),
        (Dataset.from_dict({"text": ["Hi"]}), r"columns \['text'\]"),
        (Dataset.from_dict({"prompt": ["Hi"]}), r"columns \['prompt'\]"),
        (Dataset.from_dict({"input_ids": [[1]]}), r"columns \['input_ids'\]"),
        (Dataset.from_dict({"messages": [[user("Hi")]], "images": [[]]}), "images"),
        ({"train": Dataset.from_dict({"messages": []})}, "got dict"),
    ]:
        with pytest.raises(ValueError, match=message):
            add_assistant_masks(dataset, tokenizer)


def test_tokens_of_the_row_are_checked():
    """Padding or truncation that a tokenizer was left with must not reach the masks, and other tokens than TRL's raise."""
    tokenizer = make_tokenizer(LATEST)
    tokenizer("Hi", padding="max_length", truncation=True, max_length=4)
    assert mask(LATEST, [user("Hi"), assistant("Hello there.")], tokenizer) == ["Hello there.<turn|>"]
    tokenizer.split_special_tokens = True
    with pytest.raises(ValueError, match="Row 0: the rendered text and `apply_chat_template` give different tokens"):
        mask(LATEST, [user("Hi"), assistant("Hello there.")], tokenizer)
