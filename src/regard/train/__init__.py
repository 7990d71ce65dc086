"""Training: one loop for one core or many hosts, configs, data, tokenizers and checkpoints."""

from ..models.schema import ConfigError
from ..models.tokenizer import TokenizerError
from .checkpoint import CheckpointError, Progress
from .corpus import DataError
from .loop import Result, TrainError, train
from .settings import Config, DataConfig, OptimConfig, TrainConfig, config

__all__ = [
    "CheckpointError", "Config", "ConfigError", "DataConfig", "DataError", "OptimConfig", "Progress", "Result",
    "TokenizerError", "TrainConfig", "TrainError", "config", "train",
]  # fmt: skip
