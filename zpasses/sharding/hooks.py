"""The hooks that sharded models need in a process."""

from __future__ import annotations

import functools
from typing import Any

from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zpasses import compat
from zpasses.runtime.param_value import count_step
from zpasses.runtime.step_hook import install_step_hook
from zpasses.runtime.step_windows import end_windows_before_step
from zpasses.sharding.registrations import on_buffer, on_parameter
from zpasses.sharding.saved_shards import check_before_step, check_state
from zpasses.sharding.wrappers import on_module


@functools.cache
def install_hooks() -> None:
    """Install the hooks. They apply to every torch module and optimizer of this process. Further
    calls do nothing.

    Before a step, what may refuse it comes first: such a step has not begun. The windows end, the
    optimizer's own hooks run, and then a hook that `install_step_hook` adds steps.
    """
    for before in (check_before_step, end_windows_before_step):
        register_optimizer_step_pre_hook(compat.dynamo_disable(before))
    install_step_hook()
    register_optimizer_step_post_hook(compat.dynamo_disable(count_step))
    compat.call_after_optimizer_load(check_state)
    register_module_module_registration_hook(on_module)
    hook: Any = on_parameter  # torch's annotation does not know that a hook may return one
    register_module_parameter_registration_hook(hook)
    register_module_buffer_registration_hook(on_buffer)
