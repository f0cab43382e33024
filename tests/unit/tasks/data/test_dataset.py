"""Data sets of every form as problems: columns, filters, splits, weights, and what is wrong with a row."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from memory import traced

from moerl.config.load import dump_config, load_config, load_resolved
from moerl.contract.trajectory import FinishReason
from moerl.errors import ConfigError
from moerl.tasks.data.splits import SPLITS
from moerl.tasks.data.task import RowsTask

Open = Callable[..., RowsTask]
EXACT = ("task.rewards.right.kind=exact", "task.rewards.right.column=answer")
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "How many?"}]


def math_rows(count: int, first: int = 0) -> list[dict[str, Any]]:
    return [
        {"question": f"What is {i} + 1?", "answer": f"{i}+1={i + 1}\n#### {i + 1}", "level": i % 3}
        for i in range(first, first + count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        path.parent.mkdir(exist_ok=True, parents=True)
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import datasets

        datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


@pytest.fixture
def open_task() -> Iterator[Open]:
    made: list[RowsTask] = []

    def make(*overrides: str, rewards: tuple[str, ...] = EXACT) -> RowsTask:
        keys = ["recipe=tiny", "sft.steps=0", "task=dataset", *rewards, *overrides]
        task = load_config(keys, command="train").task.open()
        assert isinstance(task, RowsTask)
        made.append(task)
        return task

    yield make
    for task in made:
        task.close()


def ids(task: RowsTask, split: str) -> list[str]:
    return [prompt.prompt_id for prompt in task.prompts(split, task.size(split))]


def questions(task: RowsTask, split: str) -> list[str]:
    return [prompt.facts["question"] for prompt in task.prompts(split, task.size(split))]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "arrow"])
def test_every_form_gives_the_same_problems(name: str, open_task: Open, tmp_path: Path):
    rows = math_rows(200)
    task = open_task(f"task.path={write(tmp_path / name, rows)}", "task.prompt=question", "task.text_as=raw")
    found = {split: questions(task, split) for split in SPLITS}
    assert sorted(each for found_ones in found.values() for each in found_ones) == sorted(
        row["question"] for row in rows
    )
    assert found == {
        split: questions(open_task(f"task.path={write(tmp_path / 'other.jsonl', rows)}", "task.prompt=question"), split)
        for split in SPLITS
    }
    [prompt] = task.prompts("train", 1)
    assert prompt.text == prompt.facts["question"]
    assert all(10 < len(found[split]) < 40 for split in ("dev", "heldout"))


def test_a_text_is_a_users_message_unless_it_is_raw(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", math_rows(30))
    task = open_task(
        f"task.path={path}", "task.prompt=question", "task.system='Be short.'", "task.wording='{prompt} Answer:'"
    )
    [prompt] = task.prompts("train", 1)
    assert prompt.chat is not None
    assert [dict(each) for each in prompt.chat.messages] == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": prompt.facts["question"] + " Answer:"},
    ]


def test_messages_and_tools_of_arrow_lose_the_nulls_that_it_fills_in(open_task: Open, tmp_path: Path):
    tool = {"type": "function", "function": {"name": "now"}}
    called = {"role": "assistant", "content": "", "tool_calls": [tool]}
    rows = [
        {"prompt": [*MESSAGES, called, {"role": "tool", "content": f"{i}"}], "tools": json.dumps([tool]), "answer": "1"}
        for i in range(20)
    ]
    task = open_task(f"task.path={write(tmp_path / 'rows.parquet', rows)}", "task.tools=tools")
    [prompt] = task.prompts("train", 1)
    assert prompt.chat is not None
    assert [dict(each) for each in prompt.chat.messages[:3]] == [*MESSAGES, called]
    assert [dict(each) for each in prompt.chat.tools] == [tool]


def test_the_last_message_of_the_assistant_is_the_demonstration(open_task: Open, tmp_path: Path):
    rows = [{"prompt": [*MESSAGES, {"role": "assistant", "content": f"{i} apples"}], "n": i} for i in range(30)]
    task = open_task(f"task.path={write(tmp_path / 'rows.jsonl', rows)}")
    prompts = task.prompts("train", 1) if task.size("train") else task.prompts("dev", 1)
    assert prompts[0].chat is not None
    assert len(prompts[0].chat.messages) == 2
    assert task.demonstrations(prompts, seed=0) == [f"{prompts[0].facts['n']} apples"]


def test_filters_leave_rows_out_and_say_how_many(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", math_rows(90))
    filters = "[{column: level, one_of: [0, 1]}, {column: question, longest: 15}, {column: level, at_most: 0}]"
    task = open_task(f"task.path={path}", "task.prompt=question", f"task.filters={filters}")
    found = [q for split in SPLITS for q in questions(task, split)]
    wanted = [row["question"] for row in math_rows(90) if row["level"] == 0 and len(row["question"]) <= 15]
    assert sorted(found) == sorted(wanted)
    assert f"; rows {90 - len(wanted)} left out by filters" in task.notes()[0]


def test_own_splits_are_kept_and_lose_nothing_to_the_training_split(open_task: Open, tmp_path: Path):
    write(tmp_path / "set" / "train-0.parquet", math_rows(60))
    write(tmp_path / "set" / "train-1.parquet", math_rows(60, 60))
    # Ten of these are in the training files, too.
    write(tmp_path / "set" / "test-0.parquet", math_rows(30, 110))
    task = open_task(f"task.path={tmp_path}/set", "task.prompt=question", "task.splits.heldout=test")
    found = [set(questions(task, split)) for split in SPLITS]
    assert found[2] == {row["question"] for row in math_rows(30, 110)}
    assert sum(map(len, found)) == len(set.union(*found)) == 140
    assert "; rows 10 left out of one split because another has the same prompt" in task.notes()[0]
    assert len({*ids(task, "train"), *ids(task, "dev"), *ids(task, "heldout")}) == 140


def test_a_seed_shuffles_each_split_and_null_keeps_the_order(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", math_rows(60))
    keys = (f"task.path={path}", "task.prompt=question", "task.dev_fraction=0", "task.heldout_fraction=0")
    in_order = questions(open_task(*keys, "task.shuffle_seed=null"), "train")
    assert in_order == [row["question"] for row in math_rows(60)]
    shuffled = [questions(open_task(*keys, f"task.shuffle_seed={seed}"), "train") for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[0]) == sorted(in_order) != shuffled[0]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_stream_is_read_as_far_as_it_says_in_the_same_order_each_time(name: str, open_task: Open, tmp_path: Path):
    path = write(tmp_path / name, math_rows(300))
    keys = (f"task.path={path}", "task.prompt=question", "task.streaming=true", "task.max_rows=50")
    first, second = (Counter(q for s in SPLITS for q in questions(open_task(*keys), s)) for _ in range(2))
    assert first == second
    assert first.total() == 50
    assert first.keys() != {row["question"] for row in math_rows(50)}


def test_sets_have_shares_by_their_weights_and_every_prompt_comes(open_task: Open, tmp_path: Path):
    big, small = write(tmp_path / "big.jsonl", math_rows(90)), write(tmp_path / "small.jsonl", math_rows(10, 1000))
    keys = ("task.prompt=question", "task.dev_fraction=0", "task.heldout_fraction=0")
    sets = (f"task.sets.big.path={big}", f"task.sets.small.path={small}")
    by_size = open_task(*keys, *sets)
    assert by_size.size("train") == 100
    task = open_task(*keys, *sets, "task.sets.big.weight=3.0", "task.sets.small.weight=1.0")
    prompts = task.prompts("train", task.size("train"))
    shares = Counter(prompt.source for prompt in prompts)
    assert shares == {"big": 90, "small": 30}
    assert Counter(p.facts["question"] for p in prompts if p.source == "small") == {
        row["question"]: 3 for row in math_rows(10, 1000)
    }
    assert len({prompt.prompt_id for prompt in prompts}) == 120


def test_paths_of_sets_are_absolute_in_the_stored_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", math_rows(3))
    keys = ["recipe=tiny", "task=dataset", "task.sets.a.path=rows.jsonl", "task.sets.a.prompt=question", *EXACT]
    config = load_config(keys, command="train")
    (tmp_path / "config.yaml").write_text(dump_config(config))
    assert f"path: {tmp_path}/rows.jsonl" in (tmp_path / "config.yaml").read_text()
    assert load_resolved(tmp_path / "config.yaml") == config


BAD_ROWS = [
    ({"answer": "1"}, "keys 'answer'; expected: 'prompt' among them, or task.prompt="),
    ({"prompt": 3}, "3 under key 'prompt'; expected: a non-empty text, or messages"),
    ({"prompt": "  "}, "a non-empty text"),
    ({"prompt": []}, "seen: none; expected: messages"),
    ({"prompt": [{"role": "human", "content": "x"}]}, "message 0 has the role 'human'; expected: one of system"),
    ({"prompt": [{"from": "human", "value": "x"}]}, "from and value instead of role and content"),
    ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, "images and other parts are not supported"),
    ({"prompt": [{"role": "user", "content": " "}]}, "message 0 of the role 'user' is empty"),
    ({"prompt": [{"role": "assistant", "content": "x"}]}, "seen: none"),
    ({"prompt": [MESSAGES[0]]}, "is of the role 'system'"),
    ({"prompt": ["x"]}, "message 0 is 'x'; expected: a mapping with role and content"),
    ({"prompt": "x", "tools": "not JSON"}, "tools that are no JSON"),
    ({"prompt": "x", "response": 3}, "3 under key 'response'; expected: a text"),
]


@pytest.mark.parametrize(("row", "part"), BAD_ROWS)
def test_a_bad_row_is_named_with_its_line(row: dict[str, Any], part: str, open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "fine"}, row])
    with pytest.raises(ConfigError) as caught:
        open_task(f"task.path={path}", "task.response=response", "task.tools=tools")
    assert f"bad row {path}:2; seen: " in str(caught.value)
    assert part in str(caught.value)
    assert "remedy: correct or remove the line" in str(caught.value)


def test_a_value_that_a_filter_cannot_compare_is_named(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "level": 1}, {"prompt": "b", "level": "high"}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2; seen: 'high' under key 'level'"):
        open_task(f"task.path={path}", "task.filters=[{column: level, at_least: 1}]")


def test_a_column_that_is_no_plain_data_is_named(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.parquet", [{"prompt": "a", "when": datetime.datetime(2026, 1, 1)}])
    with pytest.raises(ConfigError, match=r"rows\.parquet:0: the column 'when' is not plain data; seen: datetime"):
        open_task(f"task.path={path}")


def test_a_broken_file_and_a_missing_split_are_named(open_task: Open, tmp_path: Path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(ConfigError, match=r"task\.path: cannot read .*broken\.parquet"):
        open_task(f"task.path={tmp_path}/broken.parquet")
    saved = write(tmp_path / "arrow", math_rows(3))
    with pytest.raises(ConfigError, match=r"task\.splits: the set has no split test"):
        open_task(f"task.path={saved}", "task.prompt=question", "task.splits.heldout=test")
    with pytest.raises(ConfigError, match=r"task\.path: cannot read"):
        open_task(f"task.path={tmp_path}")


def test_a_parquet_file_that_unpacks_to_gigabytes_is_refused_before_it_does(open_task: Open, tmp_path: Path):
    prompts = pa.DictionaryArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"prompt": prompts}), tmp_path / "rows.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "rows.parquet").stat().st_size < 3000
    with traced() as peak, pytest.raises(ConfigError, match=r"rows\.parquet unpacks to far more than it holds"):
        open_task(f"task.path={tmp_path}/rows.parquet")
    assert peak() < 64 << 20


def test_a_saved_set_that_unpacks_to_much_is_refused(open_task: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved = write(tmp_path / "arrow", [{"prompt": "a" * 1000, "answer": "1"}] * 50)
    monkeypatch.setattr("moerl.tasks.data.sources.most_bytes", lambda _: 40_000)
    with pytest.raises(ConfigError, match=r"arrow unpacks to far more than it holds; seen: 40,\d* bytes up to row 39"):
        open_task(f"task.path={saved}")


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_saved_set_with_compressed_buffers_is_refused(compression: str, open_task: Open, tmp_path: Path):
    saved = write(tmp_path / "arrow", [{"prompt": "a" * 1000, "answer": "1"}] * 50)
    [file] = saved.glob("*.arrow")
    with pa.ipc.open_stream(file.read_bytes()) as stream:
        table = stream.read_all()
    with pa.ipc.new_stream(file, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as packed:
        packed.write_table(table)
    with pytest.raises(ConfigError, match=rf"{file.name} has compressed buffers"):
        open_task(f"task.path={saved}")


def test_no_rows_at_all_is_said_before_the_run(open_task: Open, tmp_path: Path):
    task = open_task(f"task.path={write(tmp_path / 'rows.jsonl', [])}")
    with pytest.raises(ConfigError, match=r"no row is left; seen: data rows\.jsonl: train 0"):
        task.check(num_demonstrations=0)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["task.path=null"], "task.path and task.hub: none of them is given"),
        (["task.path=nowhere.jsonl"], "task.path: no such file or directory"),
        (["task.hub=owner/name"], "task.path and task.hub: both are given"),
        (["task.wording='no place'"], "task.wording: must hold {prompt} once"),
        (["task.streaming=true"], "task.streaming: a stream has no end of its own"),
        (["task.filters=[{column: x}]"], "task.filters[0]: has no condition"),
        (["task.filters=[{colum: x}]"], "task.filters.0.colum"),
        (["task.dev_fraction=0.5", "task.heldout_fraction=0.5"], "nothing is left to train on"),
        (["task.chat_options.messages=1"], "task.chat_options.messages: not an option"),
        (
            ["task.chat_options.enable_thinking=false", "task.thinking_end='</think>'"],
            "task.thinking_end: the prompt ends thinking already",
        ),
        (["task.accuracy=left"], "task.accuracy: no such reward; seen: left; expected: right"),
        (["task.rewards.right.weight=0.0"], "task.rewards: nothing is trained on"),
        (["task.rewards.right.kind=exat"], "task.rewards.right.kind: unknown kind; seen: exat; expected: 'function'"),
        (["task.rewards.right.colum=x"], "task.rewards.right.colum: unknown key of a reward of the kind exact"),
        (["task.rewards.reward.kind=math"], "task.rewards.reward"),
        (["task.rewards.f.kind=regex", "task.rewards.f.pattern='('"], "task.rewards.f.pattern: wrong value"),
        (["task.rewards.f.kind=json"], "file and column: one of them must be given"),
        (["~task.rewards"], "not an assignment"),
    ],
)
def test_a_wrong_configuration_is_refused_before_anything_is_read(
    overrides: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "rows.jsonl", math_rows(3))
    keys = ["recipe=tiny", "sft.steps=0", "task=dataset", "task.path=rows.jsonl", *EXACT, *overrides]
    with pytest.raises(ConfigError) as caught:
        load_config(keys, command="train")
    assert part in str(caught.value)


def test_the_task_rewards_by_name_and_sum(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", math_rows(30))
    form = ("task.rewards.form.kind=regex", "task.rewards.form.pattern='#### \\d+'", "task.rewards.form.weight=0.25")
    pattern = "task.rewards.right.answer_pattern='#### (.+)'"
    task = open_task(f"task.path={path}", "task.prompt=question", pattern, rewards=(*EXACT, *form))
    [prompt] = task.prompts("train", 1)
    answer = prompt.facts["answer"].rpartition(" ")[2]
    unscored = {"right.unscored": 0.0, "form.unscored": 0.0}
    rewards = task.reward(prompt, answer, FinishReason.STOP).result()
    assert rewards == {"reward": 1.0, "accuracy": 1.0, "right": 1.0, "form": 0.0, **unscored}
    rewards = task.reward(prompt, "#### 9", FinishReason.STOP).result()
    assert rewards == {"reward": 0.25, "accuracy": 0.0, "right": 0.0, "form": 1.0, **unscored}


def test_rewards_see_what_follows_the_thinking_and_nothing_of_one_that_was_cut_off(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", math_rows(30))
    pattern = "task.rewards.right.answer_pattern='#### (.+)'"
    task = open_task(f"task.path={path}", "task.prompt=question", pattern, "task.thinking_end='</think>'")
    task.try_rewards()
    [prompt] = task.prompts("train", 1)
    answer = prompt.facts["answer"].rpartition(" ")[2]
    responses = (f"hm</think>\n{answer}", f"a</think>b</think>{answer}", f"{answer}</think>", answer, "")
    found = [task.reward(prompt, each, FinishReason.STOP).result()["reward"] for each in responses]
    assert found == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_a_reward_that_cannot_look_at_a_harmless_response_is_refused_before_the_run(open_task: Open, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", math_rows(30))
    form = ("task.rewards.form.kind=regex", "task.rewards.form.pattern='(?:[A-Za-z]+[; ]?)+!'")
    task = open_task(
        f"task.path={path}", "task.prompt=question", "task.rewards.form.timeout_seconds=0.5", rewards=(*EXACT, *form)
    )
    with pytest.raises(ConfigError, match=r"task\.rewards\.form: tried before the run, it could not score"):
        task.try_rewards()
