from fake_llm import WORDS

ANSWER = "".join(WORDS)


def said(*turns):
    """User and assistant by turns."""
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(turns)]


def test_answers_are_streamed_and_remembered(chat, llm):
    result = chat("Hi", "", "  And?  ")
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{ANSWER}\n{ANSWER}\n", "")
    assert llm().chats == [said("Hi"), said("Hi", ANSWER, "And?")]
    assert llm().closed


def test_reset_keeps_the_system_message(chat, llm):
    chat("Hi", "/reset", "Again", flags=("--system", "Be brief."))
    system = [{"role": "system", "content": "Be brief."}]
    assert llm().chats == [system + said("Hi"), system + said("Again")]


def test_leaving(chat, llm):
    for word in ("/exit", "/quit"):
        assert chat(word, "Hi").exit_code == 0
        assert llm().chats == []


def test_commands(chat, llm):
    result = chat("/help", "/nonsense now")
    assert "/reset" in result.stdout
    assert result.stderr == "octavo: error: /nonsense: no such command; /help lists them\n"
    assert llm().chats == []


def test_an_interrupt_stops_the_answer_and_keeps_it_so_far(chat, llm):
    result = chat("interrupt", "Hi")
    assert result.exit_code == 0
    assert result.stdout == f"{WORDS[0]}{WORDS[1]}\n{ANSWER}\n"
    assert result.stderr == "(stopped)\n"
    assert llm().ended == ["interrupt", "Hi"]
    assert llm().chats[1] == said("interrupt", WORDS[0] + WORDS[1], "Hi")


def test_an_interrupt_before_the_first_word(chat, llm):
    chat("interrupt early", "Hi")
    assert llm().chats[1] == said("interrupt early", WORDS[0], "Hi")


def test_a_second_interrupt_leaves(chat, llm):
    result = chat("interrupt twice", "Hi")
    assert result.exit_code == 130
    assert (llm().ended, llm().closed) == (["interrupt twice"], True)


def test_an_interrupt_at_the_prompt_gives_a_hint(chat, monkeypatch):
    lines = iter([KeyboardInterrupt, "Hi", EOFError])

    def read(prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", read)
    result = chat()
    assert (result.exit_code, result.stdout) == (0, f"{ANSWER}\n")
    assert result.stderr == "\n(Ctrl-D or /exit leaves)\n"


def test_a_conversation_that_outgrows_the_context(chat, llm):
    result = chat("Hi", "long", "Hi again")
    assert result.exit_code == 0
    assert result.stderr == (
        "octavo: error: the prompt has 9000 tokens, and the context holds 2048; /reset forgets the conversation so far\n"
    )
    assert llm().chats[-1] == said("Hi", ANSWER, "Hi again")


def test_a_turn_that_fails_leaves_no_trace(chat, llm):
    result = chat("fail", "untemplated", "Hi")
    assert result.exit_code == 0
    assert result.stderr == "octavo: error: a NaN\noctavo: error: the model has no chat template\n"
    assert llm().chats[-1] == said("Hi")


def test_a_cut_answer_says_so(chat, llm):
    result = chat("Hi", flags=("--max-tokens", "2"))
    assert (result.stdout, result.stderr) == (f"{WORDS[0]}{WORDS[1]}\n", "(cut at --max-tokens or the end of the context)\n")
    assert llm().params[0].max_tokens == 2
