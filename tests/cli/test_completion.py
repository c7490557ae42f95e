"""The completion scripts, run by the shell."""

import shutil
import subprocess

import pytest

from wfm_ds.cli.completion import generate_script
from wfm_ds.cli.main import COMMANDS, main
from wfm_ds.recipe import shipped_recipes

COMPLETE = """
source wfm.bash
while read -r line; do
    COMP_WORDS=($line) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    [[ ${COMP_WORDS[COMP_CWORD]} == _ ]] && COMP_WORDS[COMP_CWORD]=""
    _shtab_wfm
    echo "${COMPREPLY[@]}"
done
"""
CASES = {  # {command line, where _ is an empty last word: completions}
    "wfm tr": "train",
    "wfm train sd3_flow_grpo": "sd3_flow_grpo sd3_flow_grpo_fast",
    "wfm train min": "mine.yaml",
    "wfm train mine.yaml --gp": "--gpus",
    "wfm train mine.yaml --gpus 2 --over": "--overwrite",
    "wfm check --tiny digits/n": "digits/nft",
    "wfm recipes sh": "show",
    "wfm recipes copy cp_mo": "cp_mock",
    "wfm models ch": "check",
    "wfm models check --ti": "--tiny",
    "wfm data capt": "captions",
    "wfm data pict": "pictures",
    "wfm data captions pict": "pictures",
    "wfm data captions pictures --ov": "--overwrite",
    "wfm generate --lora pict": "pictures",
    "wfm answer --dtype bf": "bfloat16",
    "wfm rewards picks": "pickscore",
    "wfm init --rl picks": "pickscore",
    "wfm completion _": "bash zsh",
}


@pytest.fixture
def scripts(tmp_path, capsys):
    """Write the scripts, a recipe, a file and a folder to `tmp_path`. Return the scripts' texts."""
    texts = {}
    for shell in ("bash", "zsh"):
        assert main(["completion", shell]) == 0
        texts[shell] = capsys.readouterr().out
        assert texts[shell] == generate_script(shell, COMMANDS)
        (tmp_path / f"wfm.{shell}").write_text(texts[shell])
    (tmp_path / "mine.yaml").touch()
    (tmp_path / "mine.txt").touch()
    (tmp_path / "pictures").mkdir()
    return texts


def complete_lines(lines, folder):
    done = subprocess.run(
        ["bash", "--norc", "-c", COMPLETE], input="\n".join(lines) + "\n", capture_output=True, text=True, cwd=folder
    )
    assert done.stderr == ""
    return dict(zip(lines, done.stdout.splitlines(), strict=True))


def test_bash_completes_commands_options_recipes_and_files(scripts, tmp_path):
    assert complete_lines(CASES, tmp_path) == CASES
    commands = complete_lines(["wfm _"], tmp_path)["wfm _"].split()
    assert sorted(commands) == sorted({name.split()[0] for name in COMMANDS})


def test_zsh_knows_each_command_and_recipe(scripts, tmp_path):
    assert scripts["zsh"].startswith("#compdef wfm\n")
    for name in COMMANDS:
        assert f"\n    {name.split()[-1]}:" in scripts["zsh"], name
    names = shipped_recipes.list_recipe_names()
    assert f"compadd -- {' '.join(names)}\n" in scripts["zsh"]
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", tmp_path / "wfm.zsh"], check=True)


def test_another_shell_is_refused(capsys):
    assert main(["completion", "tcsh"]) == 2
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
