"""Training: one loop for one core or many hosts, configs, data, tokenizers and checkpoints."""

from .checkpoint import CheckpointError, Progress, load_run
from .corpus import DataError
from .loop import Result, TrainError, train
from .settings import Config, ConfigError, DataConfig, OptimConfig, TrainConfig, config
from .tokenizer import Tokenizer, TokenizerError

__all__ = [
    "CheckpointError", "Config", "ConfigError", "DataConfig", "DataError", "OptimConfig", "Progress", "Result",
    "Tokenizer", "TokenizerError", "TrainConfig", "TrainError", "config", "load_run", "train",
]  # fmt: skip
