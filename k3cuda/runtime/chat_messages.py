"""What a caller's messages may look like, checked and brought into one form before `chat` renders them."""

import json

from ..errors import RequestError

ROLES = ("system", "user", "assistant", "tool")
_IMAGE_PARTS = ("image", "image_url", "input_image")


def check_messages(messages) -> list[dict]:
    """Copies of the messages in one form: `role` one of ROLES; assistants have `reasoning` (text) and `tool_calls`
    (list of {id, name, arguments}). The caller's objects are left alone."""
    if not isinstance(messages, (list, tuple)):
        raise RequestError("messages_malformed", found("messages", messages, "a list"))
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_message(message, where: str) -> dict:
    if not isinstance(message, dict):
        raise RequestError("messages_malformed", found(where, message, "an object with role and content"))
    role = message.get("role")
    role = "system" if role == "developer" else role
    if role not in ROLES:
        raise RequestError("unknown_role", found(f"{where}.role", role, ", ".join(ROLES)))
    message = {**message, "role": role}
    if role == "assistant":
        message["reasoning"] = _reasoning(message, where)
        message["tool_calls"] = _tool_calls(message.get("tool_calls"), f"{where}.tool_calls")
    elif role == "system" and check_tools(message.get("tools"), f"{where}.tools"):
        return message
    elif "content" not in message:
        raise RequestError("content_malformed", f"{where}: no content, wanted text or a list of text parts")
    return message


def check_tools(tools, where: str) -> bool:
    """Whether there are tools to declare; `tools_malformed` if that is no list of tool declarations."""
    if tools is None:
        return False
    if not isinstance(tools, (list, tuple)):
        raise RequestError("tools_malformed", found(where, tools, "a list of tool declarations"))
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise RequestError("tools_malformed", found(f"{where}[{i}]", tool, "an object with type and function"))
        function = tool.get("function", {"name": "?"})  # other types of tools have no function
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise RequestError("tools_malformed", f"{where}[{i}].function: no name, wanted an object with a name")
    return bool(tools)


def text_parts(message: dict, where: str) -> list[str]:
    """Text of a message; parts stay apart because each is encoded on its own."""
    content, where = message.get("content"), f"{where}.content"
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, (list, tuple)):
        raise RequestError("content_malformed", found(where, content, "text or a list of text parts"))
    return [_text_part(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _text_part(part, where: str) -> str:
    if not isinstance(part, dict):
        raise RequestError("content_malformed", found(where, part, 'an object {"type": "text", "text": ...}'))
    kind = part.get("type")
    if kind in _IMAGE_PARTS:
        raise RequestError("image_unsupported", f"{where}: found an image, wanted text", "this engine runs text only")
    if kind not in ("text", "input_text"):
        raise RequestError("part_unsupported", found(f"{where}.type", kind, "text"))
    if not isinstance(part.get("text"), str):
        raise RequestError("content_malformed", found(f"{where}.text", part.get("text"), "text"))
    return part["text"]


def name_of(message: dict, where: str) -> dict[str, str]:
    """The `name` attribute of a message: none where the name is missing or empty."""
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise RequestError("name_malformed", found(f"{where}.name", name, "text"))
    return {"name": name} if name else {}


def _reasoning(message: dict, where: str) -> str:
    for key in ("reasoning_content", "reasoning"):
        if value := message.get(key):
            if not isinstance(value, str):
                raise RequestError("reasoning_malformed", found(f"{where}.{key}", value, "text"))
            return value
    return ""


def _tool_calls(calls, where: str) -> list[dict]:
    if calls is None:
        return []
    if not isinstance(calls, (list, tuple)):
        raise RequestError("tool_calls_malformed", found(where, calls, "a list of calls"))
    checked = []
    for i, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise RequestError("tool_calls_malformed", f"{where}[{i}]: no function with a name, wanted one")
        call_id = _call_id(call, "id", f"{where}[{i}]")
        checked.append({"id": call_id, "name": function["name"], "arguments": function.get("arguments")})
    return checked


def _call_id(message: dict, key: str, where: str) -> str | None:
    call_id = message.get(key)
    if call_id is None or isinstance(call_id, str):
        return call_id
    if not isinstance(call_id, int) or isinstance(call_id, bool):
        raise RequestError("tool_call_id_malformed", found(f"{where}.{key}", call_id, "text"))
    return to_json(call_id, f"{where}.{key}")


def arguments_of(arguments, where: str):
    """Yield (tag, text, attributes) of the elements of a call: one `argument` each, in the order given; text that is
    no JSON goes out as it is, in one `json` element."""
    where = f"{where}.arguments"
    if isinstance(arguments, str):
        if not arguments.strip():
            return
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            yield "json", arguments, {"type": "object"}
            return
        except (ValueError, RecursionError) as error:
            raise _unreadable(error, where) from None
    elif arguments is None:
        return
    if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
        raise RequestError("arguments_not_object", found(where, arguments, "a JSON object, as an object or as text"))
    for key, value in arguments.items():
        text = value if isinstance(value, str) else to_json(value, f"{where}.{key}")
        yield "argument", text, {"key": key, "type": _type_of(value)}


def _type_of(value) -> str:
    # bool before number: Python counts True as an int.
    kinds = ((str, "string"), (bool, "boolean"), (type(None), "null"), ((int, float), "number"), (dict, "object"))
    return next((kind for python_type, kind in kinds if isinstance(value, python_type)), "array")


def to_json(value, where: str, canonical: bool = False) -> str:
    """JSON with blanks after `,` and `:`, keys in the order given; canonical: no blanks, keys sorted at every level."""
    separators = (",", ":") if canonical else (", ", ": ")
    try:
        return json.dumps(value, ensure_ascii=False, separators=separators, sort_keys=canonical)
    except (TypeError, ValueError, RecursionError) as error:
        raise _unreadable(error, where) from None


def _unreadable(error: Exception, where: str) -> RequestError:
    if isinstance(error, RecursionError):
        return RequestError("nesting_too_deep", f"{where[:200]}: nested too deeply, wanted a few hundred levels")
    if "digits" in str(error):  # Python's limit for turning long integers into text and back
        return RequestError("number_too_long", f"{where[:200]}: an integer of thousands of digits", "send it as text")
    return RequestError("not_json", f"{where[:200]}: not representable in JSON ({str(error)[:120]})")


class ToolTurn:
    """The calls of the latest assistant message, and how many results answered them: names and orders the results."""

    def __init__(self, calls: list[dict]):
        self.calls, self.num_results = calls, 0
        self.position_of: dict[str, int] = {}
        for position, call in enumerate(calls):
            if call["id"] is not None:
                self.position_of.setdefault(call["id"], position)

    def order(self, results: list[dict], first: int) -> list[tuple[dict, str, int, str]]:
        """(result, tool name, index from 1, where) of a run of results that starts at `messages[first]`.

        If every result has the id of a call, results take the order and the names of the calls. One without leaves
        the run as given; names then come from the results themselves, else from the call at the same position.
        """
        wheres = [f"messages[{first + i}]" for i in range(len(results))]
        positions = [self.position_of.get(self._id_of(*pair)) for pair in zip(results, wheres, strict=True)]
        matched, order = None not in positions, range(len(results))
        ordered = []
        for i in sorted(order, key=positions.__getitem__) if matched else order:
            self.num_results += 1
            name = self.calls[positions[i]]["name"] if matched else self._name_of(results[i], wheres[i])
            ordered.append((results[i], name, self.num_results, wheres[i]))
        return ordered

    @staticmethod
    def _id_of(result: dict, where: str) -> str | None:
        key = "tool_call_id" if result.get("tool_call_id") is not None else "id"
        return _call_id(result, key, where)

    def _name_of(self, result: dict, where: str) -> str:
        for key in ("tool", "name"):
            if name := result.get(key):
                if not isinstance(name, str):
                    raise RequestError("name_malformed", found(f"{where}.{key}", name, "text"))
                return name
        if self.num_results > len(self.calls):
            raise RequestError(
                "unresolvable_tool_name",
                f"{where}: a tool result without a call before it, an id of a call, or a name",
                "give it the tool_call_id of a call in the assistant message before it",
            )
        return self.calls[self.num_results - 1]["name"]


def _is_name(name) -> bool:
    return isinstance(name, str) and name != ""


def found(where: str, value, wanted: str) -> str:
    """The words for a value of the wrong kind; text is quoted, anything else may be too deep or too long to show."""
    kinds = {dict: "an object", list: "a list", type(None): "nothing", bool: "a boolean", int: "a number"}
    shown = f"{value[:80]!r}" if isinstance(value, str) else kinds.get(type(value), type(value).__name__)
    return f"{where}: found {shown}, wanted {wanted}"
