"""Every error that the runtime raises on purpose.

ShardingError
├── WrapError          (ValueError)    a module cannot be wrapped as asked
├── UnsupportedError   (NotImplementedError)  an option that this runtime does not serve
├── StateError         (RuntimeError)  an operation at a time at which it cannot be done
└── LoadError          (ValueError)    a state dict does not fit the module or optimizer
"""

from __future__ import annotations


class ShardingError(Exception):
    """Root of all errors of this package."""


class WrapError(ShardingError, ValueError):
    """A module, or the way it is to be wrapped, does not make sense."""


class UnsupportedError(ShardingError, NotImplementedError):
    """An option that this runtime does not serve."""


class StateError(ShardingError, RuntimeError):
    """Parameters are gathered, or a step is under way, where that must not be."""


class LoadError(ShardingError, ValueError):
    """A state dict does not fit."""
