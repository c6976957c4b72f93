"""What people paste from commands of others: accepted with one line, or refused with the way out; and names of models on a hub."""
import click
import pytest
from command import k3

from k3cuda.cli import main
from k3cuda.cli.pasted import OF_A_BENCHMARK, OF_A_MODEL, OF_A_SERVER

OPENS_A_MODEL = ["generate", "chat", "serve", "eval"]
VALUES = {"--generation-config": "auto", "--mamba-ssm-cache-dtype": "float32", "--gpu-memory-utilization": "0.9", "--pipeline-parallel-size": "1",
          "--data-parallel-size": "1", "--speculative-algorithm": "DSPARK", "--speculative-eagle-topk": "1", "--schedule-policy": "fcfs", "--dataset-name": "random"}


def words(table):
    for name, (_, attributes) in table.items():
        yield [name] if attributes.get("is_flag") else [name, VALUES.get(name, "x")]


def test_every_line_says_why():
    given = [word for pair in words(OF_A_MODEL) for word in pair]
    said = k3("generate", "tiny-random", "-p", "hi", "-n", 1, "-s", 1, *given).stderr.decode().splitlines()
    assert said == [f"{name} is not needed: {why}" for name, (why, _) in OF_A_MODEL.items()]
    assert k3("generate", "tiny-random", "-p", "hi", "-n", 1, "-s", 1, "-q", *given).stderr == b""


@pytest.mark.parametrize("name", OPENS_A_MODEL)
def test_commands_that_open_a_model_take_them(name):
    command = main.commands[name]
    tables = OF_A_MODEL | (OF_A_SERVER if name == "serve" else {})
    for given in (list(words(tables)), [[alias, VALUES.get(n, "x")] for n, (_, a) in tables.items() if not a.get("is_flag") for alias in a.get("aliases", ())]):
        args = ["tiny-random", "demo"] if name == "eval" else ["tiny-random"]
        context = command.make_context(name, [*args, *(w for pair in given for w in pair)], parent=click.Context(main))
        assert not {p.replace("-", "_").strip("_") for p in tables} & context.params.keys()


def test_a_benchmark_of_a_server_takes_its_own():
    context = main.commands["bench"].commands["serve"].make_context("serve", [w for pair in words(OF_A_BENCHMARK) for w in pair], parent=click.Context(main))
    assert not {name[2:].replace("-", "_") for name in OF_A_BENCHMARK} & context.params.keys()


def commands(group=main):
    for command in group.commands.values():
        yield from commands(command) if isinstance(command, click.Group) else [command]


@pytest.mark.parametrize("command", list(commands()), ids=lambda c: c.name)
def test_no_spelling_is_two_flags(command):
    spellings = [s for p in command.params if isinstance(p, click.Option) for s in (*p.opts, *p.secondary_opts, *p.aliases)]
    assert len(spellings) == len(set(spellings)), sorted(s for s in spellings if spellings.count(s) > 1)


@pytest.mark.parametrize("given, said", [
    (["--gpu-memory-utilization", "0.5"], "found '0.5', wanted 0.9 to 1"), (["--mem-fraction-static", "x"], "found 'x', wanted 0.9 to 1"),
    (["-pp", "2"], "found '2', wanted 1; give --tp alone"), (["--dp-size", "4"], "found '4', wanted 1; give --tp alone"),
    (["--speculative-algorithm", "EAGLE"], "wanted dspark"), (["--generation-config", "vllm"], "wanted auto"), (["--enable-lora"], "No such option")])
def test_what_would_change_something_is_refused(given, said):
    assert said in " ".join(k3("generate", "tiny-random", "-p", "hi", *given, code=2).stderr.decode().split())


def test_a_whole_command():
    """As recipes write it, with the model here."""
    given = ("--trust-remote-code --tensor-parallel-size 1 --max-model-len 64 --max_num_seqs 2 --gpu-memory-utilization 0.95 --kv-cache-dtype auto "
             "--load-format safetensors --enforce-eager --dtype bfloat16").split()
    assert k3("generate", "tiny-random", "-p", "hi", "-n", 1, *given).stdout


@pytest.mark.parametrize("args", [["generate", "-p", "x"], ["chat"], ["check"], ["plan"], ["tokenize", "-p", "x"], ["repack", "--tp", "1", "--out", "{tmp}/x"],
                                  ["compile", "--output", "{tmp}/x"], ["bench", "latency"], ["bench", "decode"]], ids=lambda a: " ".join(a[:2]))
def test_a_name_on_the_hub_is_told_how_to_be_downloaded(args, tmp_path):
    done = k3(*(a.format(tmp=tmp_path) for a in args), "-m", "moonshotai/Kimi-K3", code=3)
    assert b"hf download moonshotai/Kimi-K3 --local-dir Kimi-K3" in done.stdout + done.stderr


def test_a_path_that_is_missing_is_no_name_on_the_hub():
    done = k3("generate", "/models/none/Kimi-K3", "-p", "x", code=3)
    assert b"hf download" not in done.stderr
