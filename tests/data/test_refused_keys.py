"""Keys of the data section that do not fit together are refused, with the key and the reason."""

import pytest
from pydantic import ValidationError

from each_case import check_each
from wfm_ds.recipe.data import DataRecipe

POSE = {"feature": "s", "at": "0:6", "rotation": "euler_xyz"}
MIRROR = [[1, 0, 0], [0, 1, 0], [0, 0, -1]]
STREAM = {"kind": "hf", "streaming": True, "shuffle": False}
ROBOT = {"kind": "lerobot", "inputs": ["actions", "domain"]}
CONTROL = {"inputs": ["control"]}


@check_each(
    ("keys", "message"),
    [
        ({"kind": "paired", "path": ["a", "b"]}, "lists and URLs are for webdataset and pairs"),
        ({"kind": "paired", "options": {"a": 1}}, "only for kind hf, lerobot or package.module:Class, not paired"),
        ({"kind": "paired", "prompt": "p"}, "prompt: only read with kind: folder or lerobot; remove it"),
        ({"kind": "cosmos", "caption_column": "p"}, "caption_column: only read with kind: folder or hf"),
        ({"kind": "webdataset", "image_column": "p"}, "image_column: only read with kind: folder or hf"),
        ({"kind": "hf", "prompt": "p"}, "prompt: only read with kind: folder"),
        ({"kind": "folder", "prompt": " "}, "prompt is blank"),
        ({"kind": "folder", "path": "s3://x/y"}, "kind folder reads one local folder"),
        ({"kind": "sets"}, "kind sets and the key sets belong together"),
        ({"kind": "folder", "sets": [{"path": "a"}]}, "kind sets and the key sets belong together"),
        ({"kind": "sets", "sets": [{"path": "a/c"}, {"path": "b/c"}]}, "two sets are called c"),
        ({"kind": "sets", "sets": [{"path": "a", "kind": "paired", "prompt": "p"}]}, "only read with kind"),
        ({"kind": "sets", "prompt": "p", "sets": [{"path": "a"}]}, "prompt: only read with kind: folder"),
        (STREAM | {"kind": "folder"}, "streaming is for kind hf, not folder"),
        (STREAM | {"shuffle": True}, "stored order: set shuffle: false"),
        (STREAM | {"buckets": "auto"}, "buckets needs all sizes in advance"),
        (STREAM | {"cache_latents": True, "cache_dir": "c", "clip": "centre"}, "cache_latents reads samples twice"),
        (STREAM | {"options": {"streaming": True}}, r"options\.streaming: use the key data\.streaming"),
        (CONTROL | {"kind": "lerobot"}, "inputs is for kind paired, folder, webdataset, pairs or sets, not lerobot"),
        (CONTROL | {"kind": "paired", "source_size": "stock"}, "source_size"),
        (
            CONTROL | {"kind": "paired", "input_folders": {"control_mask": "masks"}},
            "input_folders has control_mask, which is not",
        ),
        (ROBOT | {"actions": {"space": {"poses": [POSE | {"at": "0:7"}]}}}, "has 6 numbers, columns 0:7 do not"),
        (ROBOT | {"actions": {"space": {"then": [{"feature": "s", "at": "3:3"}]}}}, "columns 3:3 are empty"),
        (ROBOT | {"actions": {"space": {"poses": [POSE | {"turn": MIRROR}]}}}, "turn is not a rotation"),
        (ROBOT | {"actions": {"space": {"feature": "a", "poses": [POSE]}}}, "poses and then, not both"),
        (ROBOT | {"actions": {"space": "droid", "compose": "pose"}}, "compose: only read for stored"),
        (ROBOT | {"actions": {"rest": "last", "compose": "sum"}}, "rest: only read with compose: pose"),
        (ROBOT | {"actions": {"stats": "data"}}, "stats and normalize belong together"),
        (ROBOT | {"domain": "droid"}, "did you mean droid_lerobot"),
        (ROBOT | {"viewpoint": "wrist"}, "did you mean wrist_view"),
        (ROBOT | {"domain": 3, "inputs": ["actions"]}, "domain: only read with inputs"),
        (ROBOT | {"viewpoint": "wrist_view", "inputs": []}, "viewpoint: only read with inputs"),
        (ROBOT | {"kind": "paired", "actions": {"space": "droid"}}, "actions.space is for kind lerobot"),
        (ROBOT, "episodes of kind lerobot have no domain: set data.domain"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        DataRecipe(**{"path": "x"} | keys)
