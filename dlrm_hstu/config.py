"""The trainer's settings: one frozen dataclass per concern, gin-configurable, checked when built.

The defaults are the benchmark's (Yambda-5b, closed division). What describes the data's shape lives with it: `data.history.HistoryConfig`,
`data.index.IndexConfig`, `data.loader.StreamConfig`.
"""

from dataclasses import dataclass, field

import gin

from data.checks import check_fields, require
from data.features import CONTEXTUAL_FEATURES, DEFAULT_TABLE_ROWS
from dlrm_hstu.mlperf.facts import STATUSES, check_words


@gin.configurable
@dataclass(frozen=True)
class ModelConfig:
    """Shape and numerics of the model.

    table_dim: width of the embedding tables.
    embedding_dim: width D of the transducer.
    num_heads, attention_dim, hidden_dim: heads H, q/k width and u/v width of one head.
    num_layers: STU layers.
    preprocessor_hidden_dim, item_hidden_dim, head_hidden_dim: inner widths of the token MLPs, the item tower and the task head.
    action_dim: width of one action bit's embedding.
    max_seq_len: budget of one sequence in tokens: contextual + history + candidate.
    input_dropout, layer_dropout: drop probabilities before the first layer and inside each layer.
    table_rows: rows by table name.
    contextual_features: tables that give one token each at the head of the sequence; may be empty.
    position_buckets, time_buckets: rows of the position table; highest bucket of the time table (which has one row more).
    attention_scale: what divides the scores, "batch_max" (the batch's longest sequence, as the benchmark does) or "max_seq_len"
        (a sample's score then does not depend on its batch).
    dtype: "float32" or "bfloat16", of the transducer; item tower, head and loss are fp32 always.
    loss_weight: factor on the task's binary cross-entropy.
    kernels: "auto" (the kernels on a GPU, plain PyTorch elsewhere), "triton" or "reference".
    recompute: what a layer's backward makes again instead of keeping it from the forward: "none", or "uvqk" to keep 5 KiB a token less.
    """

    table_dim: int = 512
    embedding_dim: int = 512
    num_heads: int = 4
    attention_dim: int = 128
    hidden_dim: int = 128
    num_layers: int = 3
    preprocessor_hidden_dim: int = 256
    max_seq_len: int = 4096
    input_dropout: float = 0.2
    layer_dropout: float = 0.1
    table_rows: dict[str, int] = field(default_factory=DEFAULT_TABLE_ROWS.copy)
    contextual_features: tuple[str, ...] = CONTEXTUAL_FEATURES
    item_hidden_dim: int = 512
    head_hidden_dim: int = 512
    action_dim: int = 8
    position_buckets: int = 8192
    time_buckets: int = 2048
    attention_scale: str = "batch_max"
    dtype: str = "float32"
    loss_weight: float = 0.2
    kernels: str = "auto"
    recompute: str = "none"

    def __post_init__(self):
        check_fields(self)
        for name in ("table_dim", "embedding_dim", "num_heads", "attention_dim", "hidden_dim", "preprocessor_hidden_dim"):
            require(getattr(self, name) > 0, f"ModelConfig.{name}={getattr(self, name)}: must be positive")
        for name in ("item_hidden_dim", "head_hidden_dim", "action_dim", "position_buckets", "time_buckets"):
            require(getattr(self, name) > 0, f"ModelConfig.{name}={getattr(self, name)}: must be positive")
        require(self.num_layers >= 0, f"ModelConfig.num_layers={self.num_layers}: must not be negative")
        for name in ("input_dropout", "layer_dropout"):
            require(0 <= getattr(self, name) < 1, f"ModelConfig.{name}={getattr(self, name)}: must be in [0, 1)")
        require(self.table_dim % 4 == 0, f"ModelConfig.table_dim={self.table_dim}: the lookup kernels need a multiple of 4")
        for choice, allowed in (
            ("attention_scale", ("batch_max", "max_seq_len")),
            ("dtype", ("float32", "bfloat16")),
            ("kernels", ("auto", "triton", "reference")),
            ("recompute", ("none", "uvqk")),
        ):
            value = getattr(self, choice)
            require(value in allowed, f"ModelConfig.{choice}={value!r}: must be one of {', '.join(allowed)}")
        for table in ("item_id", "artist_id", "album_id", *self.contextual_features):
            require(table in self.table_rows, f"ModelConfig.table_rows: no rows for {table!r}; add it or drop the feature")
        for table, rows in self.table_rows.items():
            require(isinstance(rows, int) and rows > 0, f"ModelConfig.table_rows[{table!r}]={rows!r}: must be a positive integer")
        require(self.history_budget > 0, f"ModelConfig.max_seq_len={self.max_seq_len}: leaves no room for history; raise it")

    @property
    def history_budget(self) -> int:
        """History tokens that fit beside the contextual tokens and the candidate."""
        return self.max_seq_len - len(self.contextual_features) - 1


@gin.configurable
@dataclass(frozen=True)
class OptimizerConfig:
    """Adam on dense parameters, row-wise Adagrad on embedding tables, one linear warm-up for both.

    dense_lr, sparse_lr: base learning rates. 0 means the benchmark's reference rate, 1e-6 * global batch / 8192.
    warmup_steps, warmup_start_lr: step g uses start + (base - start) * min(1, g / warmup_steps), g counted from 0.
    grad_clip_norm: largest L2 norm of all dense gradients together; 0 turns clipping off.
    """

    dense_lr: float = 0.0
    sparse_lr: float = 0.0
    beta_1: float = 0.95
    beta_2: float = 0.999
    epsilon: float = 1e-8
    sparse_epsilon: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 24000
    warmup_start_lr: float = 0.0
    grad_clip_norm: float = 1.0

    def __post_init__(self):
        check_fields(self)
        for name in (
            "dense_lr",
            "sparse_lr",
            "epsilon",
            "sparse_epsilon",
            "weight_decay",
            "warmup_steps",
            "warmup_start_lr",
            "grad_clip_norm",
        ):
            require(getattr(self, name) >= 0, f"OptimizerConfig.{name}={getattr(self, name)}: must not be negative")
        for name in ("beta_1", "beta_2"):
            require(0 <= getattr(self, name) < 1, f"OptimizerConfig.{name}={getattr(self, name)}: must be in [0, 1)")


@gin.configurable
@dataclass(frozen=True)
class EvalConfig:
    """When to evaluate on the holdout, and when to stop.

    every_data_pct: fraction of the training samples between two evaluations, rounded up to whole steps; 0 turns evaluation off.
    skip_epoch_pct: no evaluation before this fraction of the training samples; negative means the benchmark's rule, from the batch size.
    auc_threshold: the target; training stops at the first evaluation that reaches it.
    num_batches: at most so many batches per evaluation; 0 means the whole holdout.
    """

    every_data_pct: float = 0.001
    skip_epoch_pct: float = -1.0
    auc_threshold: float = 0.75
    num_batches: int = 0

    def __post_init__(self):
        check_fields(self)
        require(0 <= self.every_data_pct <= 1, f"EvalConfig.every_data_pct={self.every_data_pct}: must be in [0, 1]")
        require(self.skip_epoch_pct <= 1, f"EvalConfig.skip_epoch_pct={self.skip_epoch_pct}: must be at most 1")
        require(0 <= self.auc_threshold <= 1, f"EvalConfig.auc_threshold={self.auc_threshold}: must be in [0, 1]")
        require(self.num_batches >= 0, f"EvalConfig.num_batches={self.num_batches}: must not be negative")


@gin.configurable
@dataclass(frozen=True)
class TrainConfig:
    """The run as a whole.

    batch_size: samples per rank and step. seed: of initial weights and dropout; negative draws one from system entropy.
    num_train_batches: at most so many batches per window; 0 means all.
    device: "auto" (the GPU if there is one), "cpu" or "cuda".
    run_name, results_dir: the run's files go to results_dir/run_name.
    metric_log_frequency: steps between two reports. tensorboard: write TensorBoard events.
    """

    batch_size: int = 1024
    seed: int = -1
    num_train_batches: int = 0
    device: str = "auto"
    run_name: str = "default"
    results_dir: str = "results"
    metric_log_frequency: int = 50
    tensorboard: bool = True

    def __post_init__(self):
        check_fields(self)
        for name in ("batch_size", "metric_log_frequency"):
            require(getattr(self, name) > 0, f"TrainConfig.{name}={getattr(self, name)}: must be positive")
        require(self.num_train_batches >= 0, f"TrainConfig.num_train_batches={self.num_train_batches}: must not be negative")
        require(self.device in ("auto", "cpu", "cuda"), f"TrainConfig.device={self.device!r}: must be one of auto, cpu, cuda")
        require(
            self.run_name not in ("", ".", "..") and "/" not in self.run_name,
            f"TrainConfig.run_name={self.run_name!r}: must name a folder of results_dir; set TrainConfig.results_dir for another place",
        )
        require(self.seed < 2**63, f"TrainConfig.seed={self.seed}: must be below 2^63")


@gin.configurable
@dataclass(frozen=True)
class MLPerfConfig:
    """What the MLPerf log says of the submission.

    logging: write the log. log_path: "" means mlperf.log in the run's folder.
    train_loss_log_frequency: steps between two train_loss records; 0 means TrainConfig.metric_log_frequency.
    config_filename: "" means the name of the last gin file.
    """

    logging: bool = True
    log_path: str = ""
    organization: str = "unnamed"
    division: str = "closed"
    status: str = "onprem"
    platform: str = ""
    train_loss_log_frequency: int = 0
    config_filename: str = ""

    def __post_init__(self):
        check_fields(self)
        require(self.division in ("closed", "open"), f"MLPerfConfig.division={self.division!r}: must be closed or open, in lower case")
        require(self.status in STATUSES, f"MLPerfConfig.status={self.status!r}: must be one of {', '.join(STATUSES)}")
        check_words("MLPerfConfig.organization", self.organization)
        for name in ("platform", "config_filename"):
            check_words(f"MLPerfConfig.{name}", getattr(self, name) or "default")
        require(
            self.train_loss_log_frequency >= 0,
            f"MLPerfConfig.train_loss_log_frequency={self.train_loss_log_frequency}: must not be negative",
        )
