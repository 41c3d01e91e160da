"""Conversations: messages in a form that the model's chat template reads, and a model's answer taken apart again.

Tools are told and called in the manner of Hermes and Qwen, `<tool_call>{"name": ..., "arguments": ...}</tool_call>`. To a template that
knows of no tools they are told in the system message, in the same words.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.server.errors import ApiError
from octavo.server.protocol import Message, NamedTool, Tool

CALL, CALL_END = "<tool_call>", "</tool_call>"
THINK, THINK_END = "<think>", "</think>"
QUOTE_OR_END = re.compile(f'"|{CALL_END}')
IN_STRING = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)

TOLD = """You may call functions to help with the user's question. They are described here, one JSON object a line:
<tools>
{tools}
</tools>
To call one, answer with a JSON object of its name and arguments between tags:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def messages_for(template: str | None, messages: Sequence[Message], tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """What the template is given. Arguments of earlier calls become objects, as templates write them out themselves."""
    knows_tools = template is not None and "tools" in template
    found = [_plain(message, place) for place, message in enumerate(messages)]
    if knows_tools:
        return found
    found = [_without_tools(message) for message in found]
    if tools:
        told = TOLD.format(tools="\n".join(json.dumps(tool_dict(tool), ensure_ascii=False) for tool in tools))
        if found[0]["role"] == "system":
            found[0] = {**found[0], "content": f"{found[0]['content']}\n\n{told}"}
        else:
            found.insert(0, {"role": "system", "content": told})
    return found


def tool_dict(tool: Tool) -> dict[str, Any]:
    function = tool.function
    told: dict[str, Any] = {"name": function.name, "description": function.description or ""}
    return {"type": "function", "function": told | {"parameters": function.parameters or {"type": "object", "properties": {}}}}


def _plain(message: Message, place: int) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": _text(message, place)}
    if message.role == "assistant":
        if message.reasoning_content is not None:
            found["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            found["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
                }
                for call in message.tool_calls
            ]
    elif message.tool_calls:
        raise ApiError(400, f"messages[{place}].tool_calls: given; allowed: in an assistant's message", param=f"messages[{place}]")
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    return found


def _text(message: Message, place: int) -> str:
    content = message.content
    if content is None and message.role != "assistant":
        raise ApiError(
            400, f"messages[{place}].content: null; allowed: a text, or a list of text parts", param=f"messages[{place}].content"
        )
    if not isinstance(content, list):
        return content or ""
    for number, part in enumerate(content):
        if (part.text if part.type == "text" else part.refusal) is None:
            where = f"messages[{place}].content[{number}].{part.type}"
            raise ApiError(400, f"{where}: it is missing", param=where)
    return "\n".join(str(part.text if part.type == "text" else part.refusal) for part in content)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _without_tools(message: dict[str, Any]) -> dict[str, Any]:
    """Calls and their results as text."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        written = [f"{CALL}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CALL_END}" for call in calls]
        return {"role": message["role"], "content": "\n".join([*([message["content"]] if message["content"] else []), *written])}
    return message


def forced_calls(tools: Sequence[Tool], choice: Any, several: bool) -> str | None:
    """The grammar of an answer that must call; None where it need not. Raises ApiError 400 for a tool that is not there."""
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            raise ApiError(400, f"tool_choice: no tool is named {choice.function.name!r}", param="tool_choice")
        tools, several = named[:1], False
    elif choice != "required":
        return None
    opening, closing, line = json.dumps(f"{CALL}\n"), json.dumps(f"\n{CALL_END}"), json.dumps("\n")
    any_tool = " | ".join(f"tool_{place}" for place in range(len(tools)))
    lines = [f"start: call{f' ({line} call)*' if several else ''}", f"call: {opening} ({any_tool}) {closing}"]
    for place, tool in enumerate(tools):
        schema = {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object", "properties": {}},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        lines.append(f"tool_{place}: %json {json.dumps(_rooted(schema))}")
    return "\n".join(lines)


def _rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """References of a tool's schema count from its own root, which is not the root here."""
    arguments = schema["properties"]["arguments"]
    if isinstance(arguments, dict):
        for name in ("$defs", "definitions"):
            if name in arguments:
                schema[name] = arguments[name]
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


@dataclass
class News:
    """What a piece of an answer holds."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class AnswerParser:
    """Takes one answer apart as it comes: thoughts, content, calls of tools. What may be the beginning of a tag is held back.

    thinks: whether the model's thoughts stand between tags; begun: whether the prompt has opened them. calls: whether tools may be called.
    most_calls: how many calls are told, those after them are left out; None is all.
    """

    def __init__(self, *, thinks: bool, begun: bool, calls: bool, most_calls: int | None = None) -> None:
        self._thinks, self._calls, self._most_calls = thinks, calls, most_calls
        self._state = "reasoning" if begun else "content"
        self._held = ""
        self._spaces = ""
        self._began = self._after_thoughts = False
        self._end_search = EndSearch()
        self.num_calls = 0

    def push(self, text: str, ends: bool = False) -> News:
        news = News()
        self._held += text
        while self._take(news, ends):
            pass
        return news

    def _take(self, news: News, ends: bool) -> bool:
        """Take what can be taken; whether there may be more."""
        if self._state == "content":
            tags = [*([CALL] if self._calls else []), *([THINK] if self._thinks and not self._began else [])]
            before, tag, self._held = _cut(self._held, tags, ends)
            if tag == THINK and before.strip():  # in the middle of a text it is text
                self._say(news, before + tag, False)
                return True
            self._say(news, before, ends and not tag)
            if tag:
                self._state = "reasoning" if tag == THINK else "call"
            if tag == THINK:
                self._spaces = ""
        elif self._state == "reasoning":
            before, tag, self._held = _cut(self._held, [THINK_END], ends)
            news.reasoning += before
            if tag:
                self._state, self._thinks, self._held = "content", False, self._held
                self._after_thoughts = True
        else:
            end = self._end_search.find(self._held)
            if end < 0 and not ends:
                return False
            self._end_search = EndSearch()
            body, tag, rest = (self._held, "", "") if end < 0 else (self._held[:end], CALL_END, self._held[end + len(CALL_END) :])
            call = self._call(body)
            self._held, self._state = rest, "content"
            if call is not None:
                self._spaces = ""
                if self._most_calls is None or self.num_calls <= self._most_calls:
                    news.calls.append(call)
            else:
                self._say(news, CALL + body + tag, ends)
        return bool(tag)

    def _say(self, news: News, text: str, ends: bool) -> None:
        text = self._spaces + text
        self._spaces = ""
        if self._after_thoughts and not self._began:
            text = text.lstrip()
        if self._calls and not (ends and not self.num_calls):  # spaces are nothing to be read where a call follows
            said = text.rstrip()
            self._spaces, text = text[len(said) :], said
        self._began = self._began or bool(text.strip())
        news.content += text

    def _call(self, body: str) -> dict[str, Any] | None:
        try:
            said = json.loads(body)
            name, arguments = said["name"], said.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str):
            return None
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        call = {
            "index": self.num_calls,
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": written},
        }
        self.num_calls += 1
        return call


class EndSearch:
    """Where the tag that ends a call begins, in a text that grows; what has been searched is not searched again."""

    def __init__(self) -> None:
        self._place = 0
        self._in_string = False

    def find(self, text: str) -> int:
        """The place, -1 where the tag has not come. text: that of the last time, or more. Inside a string of JSON the tag is but text."""
        while True:
            if self._in_string:
                found = IN_STRING.match(text, self._place)
                assert found is not None
                self._place = found.end()
                if not text.startswith('"', self._place):
                    return -1
                self._place, self._in_string = self._place + 1, False
            found = QUOTE_OR_END.search(text, self._place)
            if found is None:
                self._place = max(self._place, len(text) - len(CALL_END) + 1)
                return -1
            if found[0] == CALL_END:
                return found.start()
            self._place, self._in_string = found.end(), True


def _cut(text: str, tags: list[str], ends: bool) -> tuple[str, str, str]:
    """(what stands before the first tag, the tag, what follows); without one, what may begin a tag is left for later."""
    found = min(((place, tag) for tag in tags if (place := text.find(tag)) >= 0), default=None)
    if found is not None:
        place, tag = found
        return text[:place], tag, text[place + len(tag) :]
    kept = 0
    if not ends:
        kept = max((size for tag in tags for size in range(1, len(tag)) if text.endswith(tag[:size])), default=0)
    return text[: len(text) - kept], "", text[len(text) - kept :]
