"""What packages of hooks import. The engine itself has it in `engine.step.hooks`."""

from engine.step.hooks import (
    AttentionHook,
    DecodeRows,
    ExtensionError,
    Hook,
    HookError,
    HookSite,
    HookTag,
    Narrowed,
    OnFailure,
    StepRows,
)

__all__ = [
    "AttentionHook",
    "DecodeRows",
    "ExtensionError",
    "Hook",
    "HookError",
    "HookSite",
    "HookTag",
    "Narrowed",
    "OnFailure",
    "StepRows",
]
