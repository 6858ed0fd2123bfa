"""Stand-in for the types of the package `verifiers`."""

from typing import Any, Self

from verifiers import Message


class Response:
    """Answer of a model."""

    def __init__(self, message: Message) -> None:
        self.message = message

    @classmethod
    def model_validate(cls, fields: dict[str, Any]) -> Self:
        assert fields.keys() == {"id", "created", "model", "message"}
        message = fields["message"]
        assert message["finish_reason"] == "stop" and not message["is_truncated"]
        return cls(Message(role="assistant", content=message["content"], tool_calls=message["tool_calls"]))
