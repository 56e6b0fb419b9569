"""The name "zpasses" as a backend of accelerate: `Accelerator(dynamo_backend=...)`, and
`torch_compile_backend` of Trainer.

accelerate knows a fixed list of backends. Its error for another name lists neither the cause nor
what to do, so a program that uses zpasses gets another error for this one name.
"""

from __future__ import annotations

import sys
from typing import Any

from zpasses.errors import OptionError

_NAME = "ZPASSES"


def explain_dynamo_backend() -> None:
    """If the program has imported accelerate, raise OptionError where accelerate is given the
    backend "zpasses". Further calls do nothing.
    """
    backends: Any = getattr(sys.modules.get("accelerate.utils.dataclasses"), "DynamoBackend", None)
    if backends is None or hasattr(backends, "_zpasses_explained"):
        return
    original = backends._missing_

    def _missing_(cls: Any, value: object) -> Any:
        if value == _NAME:
            raise OptionError(
                "got 'zpasses' as torch_compile_backend or dynamo_backend; accelerate, which reads "
                "it, accepts only names of its own list. Leave the argument out and call "
                "zpasses.integrations.transformers.prepare(model), or "
                "zpasses.integrations.accelerate.prepare(accelerator, model), which shards the "
                "model and compiles it in place with zpasses."
            )
        return original(value)

    backends._missing_ = classmethod(_missing_)
    backends._zpasses_explained = True
