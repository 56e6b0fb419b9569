"""The hooks that sharded models need in a process."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zpasses import compat
from zpasses.runtime.step_hook import let_step_run_on_shards
from zpasses.sharding.registrations import on_buffer, on_parameter
from zpasses.sharding.saved_shards import check_before_step, check_state
from zpasses.sharding.wrappers import on_module


@functools.cache
def install_hooks() -> None:
    """Install the hooks. They apply to every torch module and optimizer of this process. Further
    calls do nothing.
    """
    # Before the step guard of `register_step_window`: a step that it refuses has not begun.
    for before in (check_before_step, let_step_run_on_shards):
        register_optimizer_step_pre_hook(compat.dynamo_disable(before))
    compat.call_after_optimizer_load(check_state)
    register_module_module_registration_hook(on_module)
    hook: Any = on_parameter  # torch's annotation does not know that a hook may return one
    register_module_parameter_registration_hook(hook)
    register_module_buffer_registration_hook(on_buffer)
