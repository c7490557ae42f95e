"""`wfm launch` (wfm_ds.cli.launch): scripts and manifests for schedulers."""

import contextlib
import os
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from each_case import check_each
from wfm_ds.cli import job_templates
from wfm_ds.cli.main import main
from wfm_ds.recipe.file import load_recipe

ROOT = Path(__file__).parent.parent.parent
K8S = ("--k8s", "--image", "registry.example/wfm_ds:1")
SKY = ("--skypilot", "--accelerator", "H100")
OUT = "run.output_dir=/shared/sft"
PATH = "model.path=/models/a b's"  # needs quotes in shells


@pytest.fixture
def written(tmp_path, monkeypatch, capsys):
    """Return the job that `wfm launch` writes with these arguments."""
    monkeypatch.chdir(tmp_path)

    def write(*words, recipe="sd3_image_sft"):
        assert main(["launch", recipe, OUT, PATH, *words, "--out", "job"]) == 0
        assert capsys.readouterr().out.startswith("wrote job; next: ")
        return (tmp_path / "job").read_text()

    return write


def require_valid_shell(script, tmp_path):
    file = tmp_path / "script.sh"
    file.write_text(script)
    checked = subprocess.run(["bash", "-n", str(file)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def run_with_tools(script, tmp_path, tools, **environ):
    """Run a script with small programs instead of the tools of a cluster. Return (exit code, output)."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name, text in tools.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(stat.S_IRWXU)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **environ}
    ended = subprocess.run(
        ["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    return ended.returncode, ended.stdout


PRINT_WORDS = 'printf "%s|" "${0##*/}" "$@"; echo'


def test_a_slurm_script_starts_one_launcher_per_node_and_requeues_itself(written, tmp_path):
    script = written("--slurm", "--nodes", "4", "--gpus", "2", "--time", "1-12:00:00", "--grace", "300")
    require_valid_shell(script, tmp_path)
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE))
    assert options == {
        **{"job-name": "sd3-image-sft", "output": "%x-%j.log", "open-mode": "append", "nodes": "4"},
        **{"ntasks-per-node": "1", "gpus-per-node": "2", "cpus-per-task": "16", "time": "1-12:00:00"},
        **{"signal": "TERM@360", "requeue": ""},
    }
    job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "16", "SLURM_NODEID": "1"}
    tools = {
        "scontrol": 'if [ "$1" = show ]; then printf "n1\\nn2\\n"; else echo "$@"; fi',
        "srun": 'shift 3; "$@"; exit "$SRUN_CODE"',  # without its options
        "deepspeed": f'{PRINT_WORDS}; cat "$2"; echo "$WFM_GRACE_S $WFM_PREEMPTED_CODE"',
    }
    command = "-m|wfm_ds.train|sd3_image_sft|run.output_dir=/shared/sft|model.path=/models/a b's|\n"
    launcher = f"deepspeed|--hostfile|{tmp_path}/sd3-image-sft.12345.hosts|--no_ssh|--node_rank|1|--master_addr|n1|"
    started = f"{launcher}--master_port|17345|{command}n1 slots=2\nn2 slots=2\n300 75\n"
    assert run_with_tools(script, tmp_path, tools, **job, SRUN_CODE="0") == (0, started)
    assert run_with_tools(script, tmp_path, tools, **job, SRUN_CODE="1") == (1, started)
    assert run_with_tools(script, tmp_path, tools, **job, SRUN_CODE="75") == (75, f"{started}requeue 12345\n")
    assert not list(tmp_path.glob("*.hosts"))


def test_a_kubernetes_job_names_its_pods_and_starts_them_again(written, tmp_path):
    service, job = yaml.safe_load_all(written(*K8S, "--nodes", "2", "--volume", "lake:/shared"))
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    actions = [
        (rule["action"], *rule.get("onExitCodes", {}).get("values", [])) for rule in spec["podFailurePolicy"]["rules"]
    ]
    assert actions == [("FailJob", 2), ("Ignore", job_templates.PREEMPTED_CODE), ("Ignore",)]
    disruption = {"type": "DisruptionTarget", "status": "True"}  # the schemas before Kubernetes 1.35 need the status
    assert spec["podFailurePolicy"]["rules"][2]["onPodConditions"] == [disruption]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["subdomain"], pod["restartPolicy"]) == (service["metadata"]["name"], "Never")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    grace = {variable["name"]: variable["value"] for variable in container["env"]}
    assert grace == {"WFM_GRACE_S": "600", "WFM_PREEMPTED_CODE": "75"}
    assert pod["terminationGracePeriodSeconds"] == 660
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "lake"}
    (script,) = container["args"]
    require_valid_shell(script, tmp_path)
    script = script.replace("/tmp/hosts", str(tmp_path / "hosts"))
    tools = {"deepspeed": f'{PRINT_WORDS}; cat "$2"'}
    code, printed = run_with_tools(script, tmp_path, tools, JOB_COMPLETION_INDEX="1")
    assert code == 0
    assert "|--node_rank|1|--master_addr|sd3-image-sft-0.sd3-image-sft|--master_port|29500|" in printed
    assert printed.endswith("sd3-image-sft-0 slots=8\nsd3-image-sft-1 slots=8\n")


def test_a_kubernetes_job_contains_a_recipe_of_the_user(written, tmp_path):
    base = load_recipe(Path("sd3_image_sft"))
    (tmp_path / "mine.yaml").write_text((ROOT / "recipes" / "sd3_image_sft.yaml").read_text() + "\n")
    text = written(*K8S, recipe="mine.yaml")
    config, _, job = yaml.safe_load_all(text)
    (tmp_path / "from_job.yaml").write_text(config["data"]["recipe.yaml"])
    assert load_recipe(tmp_path / "from_job.yaml") == base
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "recipe"]
    assert f"{mount['mountPath']}/recipe.yaml run.output_dir" in container["args"][0]


def test_a_skypilot_task_starts_a_launcher_on_each_machine(written, tmp_path):
    task = yaml.safe_load(written(*SKY, "--nodes", "2", "--gpus", "4", "--volume", "lake:/shared", "--image", "a/b:1"))
    resources = {"accelerators": "H100:4", "image_id": "docker:a/b:1", "job_recovery": {"recover_on_exit_codes": [75]}}
    assert task["resources"] == resources
    assert (task["name"], task["num_nodes"], task["volumes"]) == ("sd3-image-sft", 2, {"/shared": "lake"})
    assert "setup" not in task  # wfm_ds is in the image
    assert task["envs"] == {"WFM_GRACE_S": "600", "WFM_PREEMPTED_CODE": "75"}
    require_valid_shell(task["run"], tmp_path)
    script = task["run"].replace("/tmp/hosts", str(tmp_path / "hosts"))
    ips = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1"}
    code, printed = run_with_tools(script, tmp_path, {"deepspeed": f'{PRINT_WORDS}; cat "$2"'}, **ips)
    assert code == 0
    assert "|--node_rank|1|--master_addr|10.0.0.1|--master_port|29500|-m|wfm_ds.train|sd3_image_sft|" in printed
    assert printed.endswith("10.0.0.1 slots=4\n10.0.0.2 slots=4\n")


def test_a_skypilot_task_finds_a_recipe_in_the_copied_folder(written, tmp_path):
    (tmp_path / "mine.yaml").write_text((ROOT / "recipes" / "sd3_image_sft.yaml").read_text())
    task = yaml.safe_load(written(*SKY, recipe=str(tmp_path / "mine.yaml")))
    assert f" mine.yaml {OUT} " in task["run"]


def test_names_that_look_like_other_yaml_types_remain_texts(written):
    words = ("--name", "null", "--volume", "123:/shared", "--image")
    service, job = yaml.safe_load_all(written("--k8s", *words, "1234"))
    pod = job["spec"]["template"]["spec"]
    names = [service["metadata"]["name"], job["metadata"]["name"], service["spec"]["selector"]["job-name"]]
    assert [*names, pod["subdomain"]] == ["null"] * 4
    assert (pod["containers"][0]["image"], pod["volumes"][0]["persistentVolumeClaim"]["claimName"]) == ("1234", "123")
    task = yaml.safe_load(written("--skypilot", "--accelerator", "10", *words, "a: b's", "--force"))
    assert (task["name"], task["volumes"], task["resources"]["accelerators"]) == ("null", {"/shared": "123"}, "10:8")
    assert task["resources"]["image_id"] == "docker:a: b's"


def test_an_override_with_several_lines_reaches_the_run(written, tmp_path):
    lines = "data.path=/a\n  b\n\nc"
    _, job = yaml.safe_load_all(written(*K8S, lines))
    task = yaml.safe_load(written(*SKY, lines, "--force"))
    for script in (job["spec"]["template"]["spec"]["containers"][0]["args"][0], task["run"]):
        script = script.replace("/tmp/hosts", str(tmp_path / "hosts"))
        code, printed = run_with_tools(script, tmp_path, {"deepspeed": PRINT_WORDS})
        assert code == 0
        assert printed.endswith(f"|{OUT}|{PATH}|{lines}|\n")


def test_the_path_of_a_volume_does_not_end_with_a_slash(written):
    assert yaml.safe_load(written(*SKY, "--volume", "lake:/shared/"))["volumes"] == {"/shared": "lake"}


def test_a_script_for_hosts_returns_the_code_of_a_launcher_that_ends_at_once(written, tmp_path):
    start = "trap save_and_stop INT TERM\n"
    script = written("--pdsh", "a").replace(start, f"{start}sleep 0.3\n")
    assert run_with_tools(script, tmp_path, {"deepspeed": "exit 9"}) == (9, "")


def test_a_script_for_hosts_saves_on_sigterm(written, tmp_path):
    (tmp_path / "hostfile").write_text("# mine\na slots=2\nb slots=2\nc slots=2\n")
    script = written("--pdsh", "hostfile", "--nodes", "2", "--grace", "5")
    require_valid_shell(script, tmp_path)
    tools = {
        # The launcher sends SIGTERM to the script, and ends when pdsh has signalled a rank.
        "deepspeed": f'{PRINT_WORDS}; cat "$2"; kill "$PPID"; until [ -e signalled ]; do sleep 0.05; done; exit 9',
        "pdsh": f"{PRINT_WORDS}; touch signalled",
    }
    code, printed = run_with_tools(script, tmp_path, tools)
    assert code == 9
    first, _, asked = printed.partition("a slots=2\nb slots=2\n")
    assert first.startswith("deepspeed|--hostfile|sd3-image-sft.hosts|--master_addr|a|-m|wfm_ds.train|sd3_image_sft|")
    *words, command = asked.strip().strip("|").split("|")
    assert words == ["pdsh", "-S", "-R", "ssh", "-w", "a"]
    pattern = shlex.split(command)[-1]
    assert shlex.split(command)[:-1] == ["pkill", "-TERM", "-f", "--"]
    rank = f"python -u -m wfm_ds.train --local_rank=0 sd3_image_sft {OUT} model.path=/models/a b's"
    assert re.search(pattern, rank)
    assert not re.search(pattern, rank.replace("_rank=0", "_rank=1"))
    assert not re.search(pattern, command)  # pkill does not find the shell that runs it


@check_each(
    ("words", "message"),
    [
        ([*K8S, "--time", "1"], "--time 1 belongs to --slurm: remove it"),
        (["--k8s"], "--k8s needs --image"),
        (["--skypilot"], "--skypilot needs --accelerator"),
        (["--skypilot", "--accelerator", "H100:8"], "--accelerator H100:8: expected a type such as H100"),
        (["--slurm", "--time", "soon"], "--time soon: expected a time limit of SLURM"),
        ([*K8S, "--volume", "shared"], "--volume shared: expected NAME:PATH"),
        ([*SKY, "--volume", "lake:/"], "--volume lake:/: expected NAME:PATH"),
        (
            [*K8S, "--volume", "lake:/lake"],
            "run.output_dir /shared/sft is not on the volume lake:/lake: set run.output",
        ),
        ([*SKY, "--nodes", "2"], "--nodes 2: all machines must share run.output_dir: add --volume"),
        (["--slurm", "--name", "My job"], "--name My job: expected up to 40 lower-case letters"),
        (["--pdsh", "a,b", "--nodes", "3"], "--pdsh a,b: 2 hosts, but --nodes 3 are needed"),
        (["--pdsh", "a,b c"], "--pdsh a,b c: 'b c' is not a host such as node-a slots=8"),
        (["--pdsh", "a,a"], "--pdsh a,a: name each host once"),
        (["--pdsh", ""], "--pdsh : 0 hosts, but --nodes 1 are needed"),
        (["--pdsh", "/no/hosts"], "--pdsh /no/hosts: file not found"),
        (["--slurm", "--out", "taken"], "taken exists: choose another file with --out, or overwrite it with --force"),
        (["--slurm", "--out", "no/job"], "no/job: folder no not found"),
        (["--slurm", "--submit", "--out", "-"], "--submit needs a file: remove --out -"),
        (["--slurm", "--submit"], "--submit: sbatch is not installed here: run wfm launch without --submit"),
        (["--slurm", "engine.sequence_parallel=3"], "engine.sequence_parallel 3 does not divide the 8 ranks"),
        (["--slurm", "run.stepz=1"], "run.stepz is not a key of run"),
    ],
)
def test_a_job_that_cannot_run_is_not_written(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    Path("taken").write_bytes(b"mine \xff")
    assert main(["launch", "sd3_image_sft", OUT, *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("error: ")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_rl_on_several_machines_needs_a_reward_service(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "sd3_nft", OUT, "--slurm", "--nodes", "2"]) == 2
    assert "reward.spawn: true: the reward service cannot be reached by 8 of 16 ranks" in capsys.readouterr().err


def test_a_run_without_checkpoints_causes_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for every, warns in ((0, True), (10, False)):
        assert main(["launch", "sd3_image_sft", OUT, f"checkpoint.every={every}", "--slurm", "--out", "-"]) == 0
        assert ("warning: checkpoint.every is not set" in capsys.readouterr().err) is warns


def test_a_skypilot_task_without_storage_causes_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, warns in (([], True), (["--volume", "lake:/shared"], False), (["checkpoint.storage=s3://a/b"], False)):
        assert main(["launch", "sd3_image_sft", OUT, "checkpoint.every=10", *words, *SKY, "--out", "-"]) == 0
        assert capsys.readouterr().err.startswith("warning: the checkpoints and results are lost") is warns, words


def test_a_job_is_submitted(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("sbatch", "kubectl", "sky", "deepspeed", "pdsh"):
        (tmp_path / name).write_text(f"#!/bin/bash\n{PRINT_WORDS}; exit 3\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    jobs = {
        "sbatch|a.sbatch|": ["--slurm"],
        "kubectl|apply|-f|a.k8s.yaml|": K8S,
        "sky|launch|-c|a|a.sky.yaml|": SKY,
        f"deepspeed|--hostfile|a.hosts|--master_addr|n1|-m|wfm_ds.train|sd3_image_sft|{OUT}|": ["--pdsh", "n1,n2"],
    }
    for called, words in jobs.items():
        child = os.fork()  # the command replaces its process by the tool
        if child == 0:
            with contextlib.suppress(BaseException):
                main(["launch", "sd3_image_sft", OUT, *words, "--name", "a", "--submit"])
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert capfd.readouterr().out.splitlines()[-1] == called


def test_the_docs_show_the_script_that_the_command_writes(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "multi-node.md").read_text()
    [(command, script)] = re.findall(r"## SLURM\n\n```bash\nwfm (launch .*)\n(?:.|\n)*?```text\n((?:.|\n)*?)```", page)
    monkeypatch.chdir(tmp_path)
    assert main([*shlex.split(command), "--out", "-"]) == 0
    assert capsys.readouterr().out == script
