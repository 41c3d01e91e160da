import json

import pytest
from fake_llm import WORDS, FakeLLM

ANSWER = "".join(WORDS)


class TestOnePrompt:
    def test_streams_to_stdout_and_sums_up_on_stderr(self, generate, llm, model):
        result = generate("Hello")
        assert result.exit_code == 0
        assert result.stdout == f"{ANSWER}\n"
        tokens, rate, first, blocks = result.stderr.rstrip("\n").split(", ")
        assert (tokens, first, blocks) == ("4 tokens", "first token after 0.25 s", "at most 3 of 64 KV blocks used")
        assert rate.endswith(" tokens/s")
        assert (llm().model, llm().prompts, llm().ended, llm().closed) == (model, ["Hello"], ["Hello"], True)

    def test_is_read_from_a_pipe(self, generate, llm):
        assert generate(stdin="two\nlines\n").exit_code == 0
        assert llm().prompts == ["two\nlines"]

    def test_chat_wraps_it(self, generate, llm):
        generate("Hello", "--chat")
        assert llm().chats == [[{"role": "user", "content": "Hello"}]]
        assert llm().prompts == [{"prompt_token_ids": [0]}]

    def test_system_implies_chat(self, generate, llm):
        generate("Hello", "--system", "Be brief.")
        assert llm().chats == [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]]

    def test_json(self, generate):
        result = generate("Hello", "--json")
        assert json.loads(result.stdout) == {
            "prompt": "Hello",
            "text": ANSWER,
            "token_ids": [0, 1, 2, 3],
            "finish_reason": "stop",
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "cached_tokens": 0,
        }

    def test_json_with_prompt_logprobs(self, generate):
        record = json.loads(generate("Hey", "--json", "--prompt-logprobs", "1").stdout)
        assert record["prompt_logprobs"] == [None, *[{"7": {"logprob": -0.5, "rank": 2, "decoded_token": " a"}}] * 2]


class TestSeveralAnswers:
    """Each of the fake's answers begins a word later than the one before."""

    def test_are_numbered(self, generate):
        result = generate("Hello", "--n", "3")
        assert result.stdout == f"[1] {ANSWER}\n\n[2] {''.join(WORDS[1:])}\n\n[3] {''.join(WORDS[2:])}\n"
        assert result.stderr.startswith("3 answers, 9 tokens, ")

    def test_of_several_prompts_stand_under_theirs(self, generate):
        result = generate("first", "second", "--n", "2")
        answers = f"[1] {ANSWER}\n\n[2] {''.join(WORDS[1:])}\n"
        assert result.stdout == f"> first\n{answers}\n> second\n{answers}\n"
        assert result.stderr.startswith("2 prompts, 4 answers, 14 tokens, ")

    def test_json_has_them_in_a_list(self, generate):
        assert json.loads(generate("Hello", "--n", "2", "--json").stdout) == {
            "prompt": "Hello",
            "answers": [
                {"text": ANSWER, "token_ids": [0, 1, 2, 3], "finish_reason": "stop"},
                {"text": "".join(WORDS[1:]), "token_ids": [1, 2, 3], "finish_reason": "stop"},
            ],
            "prompt_tokens": 5,
            "completion_tokens": 7,
            "cached_tokens": 0,
        }

    def test_of_which_one_fails(self, generate):
        result = generate("first", "fail", "--n", "2", "--json")
        assert result.exit_code == 1
        assert result.stderr.endswith("octavo: error: prompt 2, answer 2: a NaN\n")
        answers = json.loads(result.stdout.splitlines()[1])["answers"]
        assert [answer.get("error") for answer in answers] == [None, "a NaN"]
        assert generate("fail", "--n", "2").exit_code == 1

    def test_that_are_cut_are_all_counted(self, generate):
        assert ", 3 cut by --max-tokens" in generate("Hi", "--n", "3", "--max-tokens", "3").stderr


class TestManyPrompts:
    def test_are_printed_in_order(self, generate, llm):
        result = generate("first", "second")
        assert result.stdout == f"> first\n{ANSWER}\n\n> second\n{ANSWER}\n\n"
        assert result.stderr.startswith("2 prompts, 8 tokens, ")
        assert llm().prompts == ["first", "second"]

    def test_json_has_a_line_for_each(self, generate):
        lines = generate("first", "second", "--json").stdout.splitlines()
        assert [json.loads(line)["prompt"] for line in lines] == ["first", "second"]

    def test_from_a_file_of_lines(self, generate, llm, tmp_path):
        (tmp_path / "prompts.txt").write_bytes("\ufefffirst\r\n\n   \n  sécond \u2028 \n".encode())
        assert generate("--file", tmp_path / "prompts.txt").exit_code == 0
        assert llm().prompts == ["first", "  sécond \u2028 "]

    def test_from_stdin_lines(self, generate, llm):
        assert generate("--file", "-", stdin="first\nsecond\n").exit_code == 0
        assert llm().prompts == ["first", "second"]

    def test_from_jsonl(self, generate, llm, tmp_path):
        messages = [{"role": "user", "content": "second"}]
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "first"}) + "\n\n" + json.dumps({"messages": messages}))
        result = generate("--file", tmp_path / "p.jsonl", "--json")
        assert llm().prompts == ["first", {"prompt_token_ids": [0]}]
        assert [json.loads(line)["prompt"] for line in result.stdout.splitlines()] == ["first", messages]
        assert "> second\n" in generate("--file", tmp_path / "p.jsonl").stdout


class TestFailures:
    @pytest.mark.parametrize(
        ("words", "stdin", "sentence"),
        [
            ((), "", "prompt 1 is empty"),
            (("",), None, "prompt 1 is empty"),
            (("a", ""), None, "prompt 2 is empty"),
            (("--file", "-"), "\n\n", "no prompt in -"),
            (("--file", "nowhere.txt"), None, "nowhere.txt: cannot be read (No such file or directory)"),
            (("a", "--file", "-"), "b", "not both"),
            (("a", "--temperature", "-1"), None, "temperature: -1.0; allowed: a number from 0"),
            (("a", "--max-tokens", "0"), None, "max_tokens: 0; allowed: a whole number from 1"),
            (("a", "--top-p", "nan"), None, "top_p: nan; allowed"),
            (("a", "--n", "0"), None, "n: 0; allowed: a whole number from 1 to 1024"),
            (("a", "--cache-salt", ""), None, "cache_salt: ''; allowed: a text that is not empty"),
            (("a", "--prompt-logprobs", "21", "--json"), None, "prompt_logprobs: 21; allowed: a whole number from 0 to 20"),
            (("a", "--prompt-logprobs", "2"), None, "--prompt-logprobs: they are printed as JSON only; give --json too"),
            (
                ("a", "--save-stats", "nowhere/run.json"),
                None,
                "nowhere/run.json: the record cannot be written (there is no folder nowhere)",
            ),
            (("a", "--save-stats", "."), None, ".: the record cannot be written (it is a folder)"),
            (("a", "--block-size", "7"), None, "--block-size: 7; allowed: a power of two"),
            (("a", "--config", "nowhere.yaml"), None, "nowhere.yaml: the configuration file cannot be read"),
            (("a", "--model", "./nowhere"), None, "./nowhere: no such file or folder"),
            (("a", "--revision", "main"), None, "revision: 'main' applies to hub ids"),
        ],
    )
    def test_bad_input_is_one_line_before_anything_is_loaded(self, generate, words, stdin, sentence):
        result = generate(*words, stdin=stdin)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("octavo: error: ")
        assert result.stderr.count("\n") == 1
        assert sentence in result.stderr
        assert FakeLLM.made == []

    @pytest.mark.parametrize("words", [("--nonsense",), ("a", "--temperature", "warm"), ("a", "--max-tokens", "1.5")])
    def test_usage(self, generate, words):
        result = generate(*words)
        assert result.exit_code == 2
        assert "Usage" in result.stderr

    @pytest.mark.parametrize("line", ["{", "[]", '{"prompt": 3}', '{"messages": ["hi"]}', '{"prompt": "a", "n": 2}', '"a"'])
    def test_a_bad_line_of_jsonl_is_named(self, generate, tmp_path, line):
        (tmp_path / "p.jsonl").write_text('{"prompt": "first"}\n' + line)
        result = generate("--file", tmp_path / "p.jsonl")
        assert result.exit_code == 2
        assert "p.jsonl, line 2: " in result.stderr

    def test_a_file_that_is_no_text(self, generate, tmp_path):
        (tmp_path / "p.txt").write_bytes(b"\xff\xfe\xff")
        result = generate("--file", tmp_path / "p.txt")
        assert (result.exit_code, "p.txt: not a text in UTF-8" in result.stderr) == (2, True)

    @pytest.mark.parametrize("more", [(), ("second",), ("--json",)])
    def test_what_the_engine_refuses(self, generate, llm, more):
        result = generate("long", *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == "octavo: error: the prompt has 9000 tokens, and the context holds 2048\n"
        assert llm().closed

    def test_no_chat_template(self, generate):
        result = generate("untemplated", "--chat")
        assert (result.exit_code, result.stderr) == (2, "octavo: error: the model has no chat template\n")

    def test_a_prompt_that_fails_in_the_model(self, generate):
        result = generate("first", "fail", "third", "--json")
        assert result.exit_code == 1
        records = [json.loads(line) for line in result.stdout.splitlines()]
        assert [record.get("error") for record in records] == [None, "a NaN", None]
        assert "octavo: error: prompt 2: a NaN\n" in result.stderr
        assert generate("fail").exit_code == 1

    def test_an_unexpected_exception_keeps_its_traceback(self, generate, llm):
        result = generate("crash")
        assert isinstance(result.exception, RuntimeError)
        assert llm().closed

    def test_interrupted(self, generate, llm):
        result = generate("interrupt")
        assert result.exit_code == 130
        assert "Traceback" not in result.output
        assert (llm().ended, llm().closed) == (["interrupt"], True)


def test_what_was_loaded_is_said_first(octavo, model):
    result = octavo("generate", "--model", model, "Hi", opening=True)
    assert result.stderr.startswith(f"{model}: no memory at all\n")


def test_a_cut_answer_says_so(generate):
    assert generate("Hi", "--max-tokens", "2").stderr.endswith(", 1 cut by --max-tokens or the end of the context\n")


def test_shared_tokens_are_told(generate, monkeypatch):
    monkeypatch.setattr(FakeLLM, "cached", 16)
    assert "KV blocks used, 32 prompt tokens shared\n" in generate("Hi", "Ho").stderr
    assert json.loads(generate("Hi", "--json").stdout)["cached_tokens"] == 16
    monkeypatch.setattr(FakeLLM, "cached", None)  # it ended before it was admitted
    assert json.loads(generate("Hi", "--json").stdout)["cached_tokens"] == 0


def test_a_pool_that_may_grow_says_how_much_of_it_is_committed(generate, monkeypatch):
    monkeypatch.setattr(FakeLLM, "ceiling", 1024)
    assert generate("Hi").stderr.endswith(", at most 3 of 1024 KV blocks used (64 committed)\n")


def test_the_cost_of_audits_is_told(generate):
    assert generate("Hi", "--check-invariants").stderr.endswith(" KV blocks used, 40 audits of 2.50 ms each (25% of the step time)\n")


class TestRecord:
    def test_is_written_and_advised_on(self, generate, octavo, tmp_path):
        file = tmp_path / "run.json"
        assert generate("Hi", "--save-stats", file).exit_code == 0
        advised = octavo("advise", file)
        assert (advised.exit_code, advised.stderr) == (0, "")
        assert advised.stdout.startswith("no load yet")
        assert octavo("advise", stdin=file.read_text()).stdout == advised.stdout
        assert json.loads(octavo("advise", file, "--json").stdout)

    def test_is_written_where_a_prompt_fails(self, generate, tmp_path):
        result = generate("fail", "--save-stats", tmp_path / "run.json")
        assert (result.exit_code, "a NaN" in result.stderr) == (1, True)
        assert (tmp_path / "run.json").exists()

    def test_that_is_none_is_refused(self, octavo, tmp_path):
        (tmp_path / "run.json").write_text("{}")
        result = octavo("advise", tmp_path / "run.json")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith(f"octavo: error: {tmp_path / 'run.json'}: not a record of this version")
