import itertools
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import gin
import pytest

from data.cli import exit_on_user_error
from dlrm_hstu import bindings, cli
from dlrm_hstu.config import ModelConfig, TrainConfig
from dlrm_hstu.knobs import KNOBS, MODULES

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.gin"))
WIDTHS = ("table_dim", "embedding_dim", "attention_dim", "hidden_dim", "preprocessor_hidden_dim", "item_hidden_dim", "head_hidden_dim")


def parse(*argv, **environment):
    return cli.parse(argv, environment)


def value_of(settings, binding):
    owner, field_name = binding.split(".")
    return next(
        getattr(getattr(settings, f.name), field_name) for f in fields(settings) if type(getattr(settings, f.name)).__name__ == owner
    )


@pytest.fixture
def gin_file(tmp_path):
    numbers = itertools.count()

    def write(text):
        path = tmp_path / f"config{next(numbers)}.gin"
        path.write_text(text)
        return str(path)

    return write


def error_of(*argv, **environment):
    """The one line a user sees."""
    with pytest.raises(ValueError) as caught:
        parse(*argv, **environment)
    assert "\n" not in str(caught.value), "an error is one line"
    return str(caught.value)


# Precedence. Values per layer: file 1, file 2, environment, command line.
PRECEDENCE = {
    "BATCH_SIZE": ("1", "2", "3", "4"),
    "DENSE_LR": ("0.1", "0.2", "0.3", "0.4"),
    "DLRM_DATA_PATH": ("'a'", "'b'", "c", "'d'"),
    "MIN_HISTORY": ("1", "2", "3", "4"),
    "MLPERF_LOGGING": ("True", "False", "1", "False"),
}


@pytest.mark.parametrize("name", PRECEDENCE)
def test_strongest_layer_wins_whichever_way_it_is_written(name, gin_file):
    binding = KNOBS[name].binding
    for forms in itertools.product(("", name, binding), ("", name, binding), ("", name), ("", name, binding)):
        argv, environment, expected = [], {}, KNOBS[name].default
        for layer, (form, text) in enumerate(zip(forms, PRECEDENCE[name], strict=True)):
            if not form:
                continue
            expected = KNOBS[name].parse(text.strip("'"))
            if layer < 2:
                argv += ["--gin_file", gin_file(f"{form} = {text}")]
            elif layer == 2:
                environment = {form: text}
            else:
                argv = ["--gin", f"{form} = {text}", *argv]  # before the files: the place on the line does not matter
        assert value_of(parse(*argv, **environment), binding) == expected, forms


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_works_from_the_environment_alone(name):
    special = {"HISTORY_STRATEGY": "last_n", "MAX_SEQ_LEN": "4200", "MLPERF_LOGGING": "off"}
    text = special.get(name, {int: "5", float: "0.5", str: "text"}.get(KNOBS[name].type))
    changed = parse(**{name: text})
    assert value_of(changed, KNOBS[name].binding) == KNOBS[name].parse(text) != KNOBS[name].default
    default = parse()
    others = [key for key in bindings.setting_defaults() if key != KNOBS[name].binding]
    assert [value_of(changed, key) for key in others] == [value_of(default, key) for key in others]


def test_last_statement_of_a_file_wins(gin_file):
    assert parse("--gin_file", gin_file("BATCH_SIZE = 1\nTrainConfig.batch_size = 2")).train.batch_size == 2
    assert parse("--gin_file", gin_file("TrainConfig.batch_size = 2\nBATCH_SIZE = 1")).train.batch_size == 1


def test_empty_environment_value_leaves_the_file_in_force(gin_file):
    assert parse("--gin_file", gin_file("BATCH_SIZE = 5"), BATCH_SIZE="").train.batch_size == 5


def test_field_tied_to_its_own_knob(gin_file):
    config = gin_file("TrainConfig.batch_size = %BATCH_SIZE")
    assert parse("--gin_file", config).train.batch_size == TrainConfig().batch_size
    assert parse("--gin_file", config, BATCH_SIZE="9").train.batch_size == 9


def test_field_tied_to_another_knob_follows_it_through_all_layers(gin_file):
    config = gin_file("IndexConfig.min_history = %HISTORY_LENGTH\nHISTORY_LENGTH = 60")
    assert parse("--gin_file", config).index.min_history == 60
    assert parse("--gin_file", config, HISTORY_LENGTH="30").index.min_history == 30
    assert parse("--gin_file", config, "--gin", "HistoryConfig.length = 15", HISTORY_LENGTH="30").index.min_history == 15
    assert parse("--gin_file", config, MIN_HISTORY="7").index.min_history == 7


def test_own_macro_in_containers_and_overridden_later(gin_file):
    rows = ", ".join(f"'{table}': %ROWS" for table in ModelConfig().table_rows)
    config = gin_file(f"ROWS = 10\nModelConfig.table_rows = {{{rows}}}\n")
    assert set(parse("--gin_file", config).model.table_rows.values()) == {10}
    assert set(parse("--gin_file", config, "--gin", "ROWS = 20").model.table_rows.values()) == {20}
    features = gin_file("FIRST = 'uid'\nModelConfig.contextual_features = [%FIRST, 'user_x_hour']\n")
    assert parse("--gin_file", features).model.contextual_features == ("uid", "user_x_hour")


def test_include_is_relative_to_its_file_and_ordered(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "base.gin").write_text("BATCH_SIZE = 1\nSEED = 1\n")
    (tmp_path / "deep" / "run.gin").write_text("SEED = 2\ninclude '../base.gin'\nBATCH_SIZE = 2\n")
    train = parse("--gin_file", str(tmp_path / "deep" / "run.gin")).train
    assert (train.batch_size, train.seed) == (2, 1)


def test_block_and_module_path_are_gin_syntax_too(gin_file):
    config = gin_file("dlrm_hstu.config.TrainConfig:\n    batch_size = 3\n    seed = 4\nconfig.EvalConfig.num_batches = 5\n")
    settings = parse("--gin_file", config)
    assert (settings.train.batch_size, settings.train.seed, settings.eval.num_batches) == (3, 4, 5)


def test_data_path_and_run_name_do_not_share_a_value():
    settings = parse(DLRM_DATA_PATH="/data/a", RUN_NAME="b")
    assert (settings.stream.path, settings.train.run_name) == ("/data/a", "b")
    assert parse(DLRM_DATA_PATH="/data/a").train.run_name == TrainConfig().run_name


# Mistakes: value, rule, nearest right name.
@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("BTCH_SIZE = 3", ["BTCH_SIZE", "did you mean BATCH_SIZE?"]),
        ("batch_size = 3", ["batch_size", "did you mean BATCH_SIZE?"]),
        ("WIDTH = 3", ["WIDTH is no knob and no setting uses it"]),
        ("ModelConfg.table_dim = 4", ["ModelConfg.table_dim", "did you mean ModelConfig.table_dim?"]),
        ("ModelConfig.table_dims = 4", ["ModelConfig.table_dims", "did you mean ModelConfig.table_dim?"]),
        ("ModelConfig.batch_size = 4", ["ModelConfig.batch_size", "did you mean TrainConfig.batch_size?"]),
        ("ModelConfig.length = 4", ["ModelConfig.length", "did you mean HistoryConfig.length?"]),
        ("BATCH_SIZE = %BTCH", ["%BTCH", "never set", "did you mean %BATCH_SIZE?"]),
        ("BATCH_SIZE = %TrainConfig.seed", ["%TrainConfig.seed", "never set"]),
        ("BATCH_SIZE = 'abc'", ["TrainConfig.batch_size='abc'", "must be of type int"]),
        ("TrainConfig.batch_size = 1.5", ["TrainConfig.batch_size=1.5", "must be of type int"]),
        ("MLPERF_LOGGING = 1", ["MLPerfConfig.logging=1", "must be of type bool"]),
        ("BATCH_SIZE = 0", ["TrainConfig.batch_size=0", "must be positive"]),
        ("DENSE_LR = 1e999", ["OptimizerConfig.dense_lr=inf", "must be a finite number"]),
        ("RUN_NAME = demo", ["RUN_NAME = demo", "quotes"]),
        ("BATCH_SIZE", ["expected NAME = VALUE"]),
        ("ModelConfig.table_rows = {'uid': 3", ["bracket"]),
        ("BATCH_SIZE = @f()", ["@f", "write a value instead"]),
        ("eval/BATCH_SIZE = 3", ["eval/BATCH_SIZE", "scopes"]),
        ("import os", ["not imports"]),
        ("SEED = %BATCH_SIZE\nBATCH_SIZE = %SEED", ["depends on itself"]),
        ("A = %B\nB = %A", ["A is no knob and no setting uses it"]),
        ("CKPT_PATH = '/checkpoints'", ["CKPT_PATH is not supported", "unset it"]),
        ("include 'absent.gin'", ["absent.gin", "no such file"]),
        ("streaming_train_eval_loop.num_train_ts = 3", ["unknown setting 'streaming_train_eval_loop.num_train_ts'"]),
    ],
)
@pytest.mark.parametrize("where", ["file", "command line"])
def test_mistake_is_one_line_that_tells_place_and_fix(statement, told, where, gin_file):
    path = gin_file(f"# first line\nSEED = 1\n{statement}\n")
    message = error_of("--gin_file", path) if where == "file" else error_of("--gin", statement)
    assert all(part in message for part in told), message
    if where == "command line":
        assert statement.startswith("include") or "--gin" in message
    else:
        assert re.search(re.escape(path) + " line [34]", message) or statement.startswith("include"), message


def test_typo_in_a_file_stays_an_error_when_the_command_line_overrides_it(gin_file):
    assert "BTCH_SIZE" in error_of("--gin_file", gin_file("BTCH_SIZE = 3"), "--gin", "BATCH_SIZE = 3")
    assert "%WIDHT" in error_of("--gin_file", gin_file("ModelConfig.table_dim = %WIDHT"), "--gin", "ModelConfig.table_dim = 32")


def test_macro_whose_reader_is_overridden_is_no_typo(gin_file):
    config = gin_file("WIDTH = 16\nModelConfig.table_dim = %WIDTH\n")
    assert parse("--gin_file", config, "--gin", "ModelConfig.table_dim = 32").model.table_dim == 32


def test_file_that_includes_itself(tmp_path):
    (tmp_path / "a.gin").write_text("include 'b.gin'\n")
    (tmp_path / "b.gin").write_text("include 'a.gin'\n")
    assert "includes itself" in error_of("--gin_file", str(tmp_path / "a.gin"))


def test_missing_file_lists_its_neighbours(gin_file):
    there = gin_file("")
    assert f"there are: {there}" in error_of("--gin_file", str(Path(there).parent / "absent.gin"))
    assert "yambda_5b.gin" in error_of("--gin_file", "/no/such/folder/absent.gin")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--gin_fil", "x"], "unknown flag '--gin_fil'|did you mean --gin_file?"),
        (["--print"], "unknown flag '--print'|did you mean --print_config?"),
        (["--batch-size=3"], "unknown flag '--batch-size'|did you mean --gin \"BATCH_SIZE = ...\"?"),
        (["configs/demo.gin"], "unknown flag 'configs/demo.gin'"),
        (["--gin"], "--gin: expected one argument"),
    ],
)
def test_wrong_flag(argv, told):
    message = error_of(*argv)
    assert all(part in message for part in told.split("|")), message


def test_malformed_environment_value_names_its_variable():
    assert error_of(BATCH_SIZE="abc") == "environment variable BATCH_SIZE='abc': must be an integer"
    assert error_of(HSTU_NUM_LAYERS="-1").endswith("must not be negative (set by environment variable HSTU_NUM_LAYERS)")
    assert "CKPT_PATH='/x' is not supported" in error_of(CKPT_PATH="/x")


def test_moot_variable_is_warned_of_once_by_rank_0(capsys):
    parse(PERSISTENT_LOADER="0", RANK="0")
    assert capsys.readouterr().err.count("warning: environment variable PERSISTENT_LOADER='0' has no effect") == 1
    parse(PERSISTENT_LOADER="0", RANK="1")
    assert capsys.readouterr().err == ""


# Checks across classes.
def test_history_must_fit_the_sequence():
    assert parse(HISTORY_LENGTH="4087").history.length == 4087  # 3 * (4087 // 3) = 4086 events; 4087 fit
    assert parse(HISTORY_LENGTH="4088").history.length == 4088
    message = error_of(HISTORY_LENGTH="4090")
    assert "4089 history + 8 contextual + 1 candidate" in message and "MAX_SEQ_LEN" in message and "(set by environment variable" in message
    assert parse(HISTORY_LENGTH="4087", HISTORY_STRATEGY="last_n").history.length == 4087
    assert "4088 history" in error_of(HISTORY_LENGTH="4088", HISTORY_STRATEGY="last_n")


def test_positions_must_cover_the_sequence():
    assert parse(MAX_SEQ_LEN="8192").model.max_seq_len == 8192
    assert "ModelConfig.position_buckets=8192" in error_of(MAX_SEQ_LEN="8193")


def test_every_width_can_be_bound():
    argv = [flag for name in WIDTHS for flag in ("--gin", f"ModelConfig.{name} = 32")]
    model = parse(*argv).model
    assert {getattr(model, name) for name in WIDTHS} == {32}
    unbound = {f.name for f in fields(ModelConfig) if f.name.endswith("_dim")} - {*WIDTHS, "action_dim"}
    assert not unbound, f"a new width needs a place in this test: {unbound}"


# Resolved config.
def test_print_config_shows_values_and_origins_and_exits(gin_file, capsys):
    path = gin_file("\nBATCH_SIZE = 7\nMIN_HISTORY = %HISTORY_LENGTH\n")
    with pytest.raises(SystemExit) as caught:
        parse("--gin_file", path, "--gin", "SEED = 3", "--print_config", HISTORY_LENGTH="60")
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"TrainConfig.batch_size = 7  # {path} line 2" in lines
    assert "TrainConfig.seed = 3  # --gin 'SEED = 3'" in lines
    assert "HistoryConfig.length = 60  # environment variable HISTORY_LENGTH" in lines
    assert f"IndexConfig.min_history = 60  # {path} line 3, %HISTORY_LENGTH from environment variable HISTORY_LENGTH" in lines
    assert "ModelConfig.table_dim = 512  # default" in lines
    assert all(any(line.startswith(f"{key} = ") for line in lines) for key in bindings.setting_defaults())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_resolved_config_read_back_gives_the_same_settings(config, gin_file):
    tricky = [
        "--gin",
        """RUN_NAME = 'it\\'s "50 %" #1 \\\\ é\\n'""",
        "--gin",
        "ModelConfig.contextual_features = ['uid']",
        "--gin",
        "DENSE_LR = 1",
    ]
    settings = parse("--gin_file", str(config), *tricky, SPLIT_SALT="-5")
    again = parse("--gin_file", gin_file(settings.config_text))
    assert again == settings
    assert again != parse("--gin_file", str(config))
    assert again.model.contextual_features == ("uid",) and type(again.optimizer.dense_lr) is float
    assert again.gin_files != settings.gin_files


def test_gin_alone_reads_the_resolved_config():
    text = parse(BATCH_SIZE="77").config_text
    try:
        gin.parse_config(text)
        assert TrainConfig().batch_size == 77
    finally:
        gin.clear_config()


def test_parsing_leaves_no_bindings_behind():
    parse(BATCH_SIZE="77")
    error_of(BATCH_SIZE="-1")
    assert TrainConfig().batch_size == 1024


# Configurations.
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_configuration_loads_and_is_annotated(config):
    assert parse("--gin_file", str(config)).gin_files == (str(config),)
    text = config.read_text()
    assert "Must be set:" in text and "Often overridden:" in text
    assert set(re.findall(r"[A-Z]+_[A-Z_]+", text[: text.index("\n\n")])) <= KNOBS.keys(), "the header names an unknown knob"
    for line in text.splitlines():
        if re.match(r"[A-Za-z_.]+ =", line):
            assert "  # " in line, f"{config.name}: no comment: {line}"


def test_the_configurations_are_the_documented_ones():
    assert {path.stem for path in CONFIGS} == {"base", "yambda_5b", "yambda_500m", "yambda_50m", "demo", "smoke"}


def test_yambda_5b_is_the_benchmark():
    settings = parse("--gin_file", str(ROOT / "configs" / "yambda_5b.gin"))
    model, stream, optimizer = settings.model, settings.stream, settings.optimizer
    assert sum(model.table_rows.values()) == 293_051_712
    assert (model.table_dim, model.embedding_dim, model.num_heads, model.attention_dim, model.hidden_dim) == (512, 512, 4, 128, 128)
    assert (model.num_layers, model.max_seq_len, model.input_dropout, model.layer_dropout) == (3, 4096, 0.2, 0.1)
    assert (model.dtype, model.attention_scale, len(model.contextual_features)) == ("bfloat16", "batch_max", 8)
    assert (stream.start_window, stream.num_windows, stream.holdout_window, stream.holdout_num_windows) == (0, 299, 299, 1)
    assert (stream.train_split_percentage, stream.shuffle_fraction) == (1.0, 0.0)
    assert (settings.history.length, settings.history.strategy, settings.index.min_history) == (4086, "interleaved", 4086)
    assert (settings.history.scan_window, settings.index.window_seconds) == (20000, 86400)
    assert (optimizer.beta_1, optimizer.beta_2, optimizer.epsilon, optimizer.weight_decay) == (0.95, 0.999, 1e-8, 0.0)
    assert (optimizer.warmup_steps, optimizer.warmup_start_lr, optimizer.grad_clip_norm) == (24000, 0.0, 1.0)
    assert (optimizer.dense_lr, optimizer.sparse_lr) == (0.0, 0.0)
    assert (settings.eval.every_data_pct, settings.eval.skip_epoch_pct, settings.eval.auc_threshold) == (0.001, -1.0, 0.75)
    assert (settings.eval.num_batches, settings.train.num_train_batches, settings.mlperf.division) == (0, 0, "closed")


@pytest.mark.parametrize(("name", "divisor"), [("yambda_5b", 1), ("yambda_500m", 10), ("yambda_50m", 100)])
def test_crosses_scale_with_the_users_and_the_header_tells_the_total(name, divisor):
    config = ROOT / "configs" / f"{name}.gin"
    settings = parse("--gin_file", str(config))
    full = ModelConfig().table_rows
    crosses = {table for table in full if "_x_" in table}
    assert settings.model.table_rows == {table: rows // divisor if table in crosses else rows for table, rows in full.items()}
    assert settings.optimizer.warmup_steps == 24000 // divisor
    assert f"{sum(settings.model.table_rows.values()):,} in all" in config.read_text()


# As a user runs it.
PROGRAM = """
import sys
from data.cli import exit_on_user_error
from dlrm_hstu import cli
with exit_on_user_error():
    cli.parse(sys.argv[1:])
print('parsed')
"""


def run(*argv):
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", PROGRAM, *argv], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_user_error_is_one_line_and_exit_code_2():
    result = run("--dry")
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(r"error: unknown flag '--dry'.*\n", result.stderr)


def test_exit_on_user_error_folds_lines_and_lets_other_errors_through(capsys):
    with pytest.raises(SystemExit) as caught, exit_on_user_error():
        raise ValueError("one\n  two")
    assert caught.value.code == 2 and capsys.readouterr().err == "error: one two\n"
    with pytest.raises(KeyError), exit_on_user_error():
        raise KeyError("a bug")


def test_flags_are_checked_before_torch_is_imported():
    program = "import sys; from dlrm_hstu import cli\ntry: cli.parse(['--nosuch'])\nexcept ValueError: print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"


def test_settings_order_is_the_registry_order():
    names = [f.type if isinstance(f.type, str) else f.type.__name__ for f in fields(cli.Settings)][: len(MODULES)]
    assert names == list(MODULES)
