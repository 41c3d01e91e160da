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
        }


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
