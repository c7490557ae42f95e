"""`wfm data prepare` rejects unusable recipes before it starts. tests/end_to_end/test_data.py tests that it fills the
caches."""

import pytest

from each_case import check_each
from wfm_ds.data.prepare import main


@check_each(
    ("overrides", "complaint"),
    [
        ([], "nothing to prepare, data.cache_dir is not set"),
        (["data.cache=x"], "data.cache"),
        (["data.kind=cosmos", "data.path=s3://bucket/folder"], "kind cosmos reads one local folder"),
        (["data.kind=paired", "data.path=[a, b]"], "lists and URLs are for webdataset"),
        (["data.allow_pickle=true"], "allow_pickle is for the embeddings of kind cosmos, not paired"),
    ],
)
def test_a_recipe_that_cannot_be_prepared_is_an_error_with_code_2(root, capsys, overrides, complaint):
    with pytest.raises(SystemExit) as left:
        main([str(root / "tests" / "recipes" / "wan21_video_sft.yaml"), *overrides])
    assert left.value.code == 2
    assert complaint in capsys.readouterr().err
