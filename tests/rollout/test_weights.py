"""Published weights on a worker's model: from a shared path or through a broker, and never partially."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from transport.peers import a_client, a_hub
from wfm_ds.engine.policies import Adapters
from wfm_ds.errors import UserError
from wfm_ds.export.target import ExportTarget
from wfm_ds.export.weight_files import create_part_folders, plan_weight_files, write_weight_files
from wfm_ds.export.weights import export_weights
from wfm_ds.models import registry
from wfm_ds.recipe import file as recipe_file
from wfm_ds.rollout.remote.publisher import PolicyManifest, find_writers, list_policy_files, publications_folder
from wfm_ds.rollout.remote.weights import PolicyWeights
from wfm_ds.transport.worker import TaskFailed

RANK = 2
TINY = Path(__file__).parents[1] / "recipes" / "sd3_nft_async.yaml"


def loaded(path, dtype=torch.float32):
    return registry.load_model(str(path), dtype=dtype, device=torch.device("cpu"))


class Trained:
    """Random weights of a denoiser, with the interface of an engine (TensorSource and ShardedSource)."""

    rank = 0

    def __init__(self, path, seed, *, lora, **kinds):
        import peft

        self.uses_lora, self.model, draw = lora, loaded(path), torch.Generator().manual_seed(seed)
        denoiser = self.model.denoiser
        self.frozen = frozenset() if lora else self.model.find_unused_parameters()
        self.config = peft.LoraConfig(
            r=RANK, lora_alpha=4, target_modules=list(self.model.default_lora_targets), **kinds
        )
        if lora:
            denoiser.add_adapter(self.config, adapter_name="default")
            Adapters(denoiser)
        with torch.no_grad():
            for name, parameter in denoiser.named_parameters():
                if name not in self.frozen and (not lora or ".default." in name):
                    parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))

    def iter_full_tensors(self, policy, dtype=torch.float32, owners=None):
        for name, tensor in self.model.denoiser.state_dict().items():
            if name not in self.frozen and (not self.uses_lora or ".default." in name):
                yield (
                    name.replace(".default.", "."),
                    tensor.to(dtype) if self.rank == (owners or {}).get(name, 0) else None,
                )

    def lora_config(self):
        return self.config if self.uses_lora else None

    def publish(self, folder, number, life="life"):
        target, settings = ExportTarget.from_model(self.model), {"policy": "old", "dtype": self.model.dtype}
        if self.uses_lora:
            export_weights(target, self, folder, is_main=True, for_workers=True, **settings)
        else:
            plan = plan_weight_files(target, self.model.dtype, range(3))
            create_part_folders(target, plan, folder)
            for self.rank in range(3):
                write_weight_files(target, self, plan, folder, rank=self.rank, **settings)
            self.rank = 0
        return PolicyManifest(life, number, str(folder), list_policy_files(folder))


def output(model):
    draw = torch.Generator().manual_seed(0)
    conditioning = model.encode_text(["a red square"])
    latents = torch.randn((1, *model.latent_shape(32, 32, 1)), generator=draw)
    with torch.no_grad():
        return model.denoise(latents, torch.tensor([0.7]), conditioning, None)


@pytest.fixture
def offered(stack):
    """`offered(manifest)`: return a client of a broker that serves the files of the manifest."""
    hub = a_hub(stack)
    client = a_client(stack, hub, run="workers")

    def offer(*manifests):
        hub.announce({}, {m.offer_name(f): Path(m.folder) / f.name for m in manifests for f in m.files})
        return client

    return offer


@pytest.mark.parametrize(
    ("lora", "kinds"),
    [(True, {}), (False, {}), (True, {"use_dora": True, "use_rslora": True, "modules_to_save": ["proj_out"]})],
    ids=["lora", "full", "dora"],
)
def test_every_publication_is_the_policy_itself(lora, kinds, offered, tiny_pipelines, tmp_path):
    path = tiny_pipelines("sd3")
    policies = [Trained(path, seed, lora=lora, **kinds) for seed in (1, 2)]
    manifests = [p.publish(tmp_path / f"v{n}", n) for n, p in enumerate(policies)]
    model = loaded(path)
    weights = PolicyWeights(model, offered(*manifests), lora=lora)
    assert weights.load_publication(manifests[0]) == 0
    assert torch.equal(output(model), output(policies[0].model))
    elsewhere = PolicyManifest("life", 1, "/nowhere", manifests[1].files)  # without a shared file system
    assert weights.load_publication(PolicyManifest.from_json(elsewhere.to_json())) == 1
    assert torch.equal(output(model), output(policies[1].model))
    assert weights.load_publication(manifests[0]) == 1, "never back to older ones"
    again = PolicyManifest("next life", 0, manifests[0].folder, manifests[0].files)
    assert weights.load_publication(again) == 0, "but another life counts anew"
    assert torch.equal(output(model), output(policies[0].model))


def test_merged_publications_are_the_policies_through_plain_layers(offered, tiny_pipelines, tmp_path):
    path = tiny_pipelines("sd3")
    policies = [Trained(path, seed, lora=True) for seed in (1, 2)]
    manifests = [p.publish(tmp_path / f"v{n}", n) for n, p in enumerate(policies)]
    model, adapters = loaded(path), []
    weights = PolicyWeights(model, offered(*manifests), lora=True, merge=True)
    for manifest, policy in zip(manifests, policies, strict=True):
        weights.load_publication(manifest)
        if not adapters:
            adapters = [part for name, part in model.denoiser.named_modules() if name.endswith("lora_A.default")]
            for part in adapters:
                part.register_forward_hook(lambda *_: pytest.fail("an adapter computed"))
        torch.testing.assert_close(output(model), output(policy.model), rtol=0, atol=1e-5)
    assert len(adapters) > 4


def test_incomplete_publications_are_refused(offered, tiny_pipelines, tmp_path):
    path = tiny_pipelines("sd3")
    first, second = (Trained(path, s, lora=True).publish(tmp_path / f"v{s}", s) for s in (1, 2))
    client = offered(first, second)
    model = loaded(path)
    weights = PolicyWeights(model, client, lora=True)
    weights.load_publication(first)
    before = output(model)
    file = next(Path(second.folder).rglob("*.safetensors"))
    content = file.read_bytes()
    for broken in (content[:-5], content[:-5] + b"other"):
        file.write_bytes(broken)
        with pytest.raises(TaskFailed, match=r"cannot be downloaded|announced hashes") as refused:
            weights.load_publication(second)
        assert not refused.value.fatal
    file.unlink()
    with pytest.raises(TaskFailed, match="cannot be downloaded"):
        weights.load_publication(second)
    assert torch.equal(output(model), before)
    assert weights.loaded_manifest == first
    file.write_bytes(content)
    assert weights.load_publication(second) == 2


def test_names_that_lead_elsewhere_are_refused(offered, tiny_pipelines, tmp_path):
    manifest = Trained(tiny_pipelines("sd3"), 1, lora=True).publish(tmp_path / "v1", 1)
    weights = PolicyWeights(loaded(tiny_pipelines("sd3")), offered(manifest), lora=True)
    for name in ("../../etc/passwd", "/etc/passwd", "lora/../../x", "plain"):
        strange = manifest.to_json()
        strange["files"][0][0] = name
        with pytest.raises(TaskFailed, match="invalid file names"):
            weights.load_publication(PolicyManifest.from_json(strange))


def test_each_run_has_its_own_folder_for_published_weights(tmp_path):
    def folder(output, policies):
        recipe = recipe_file.load_recipe(
            TINY, [f"run.output_dir={tmp_path / output}", f"rollout.policy_folder={policies}"]
        )
        return publications_folder(recipe)

    one, other = (folder(f"{name}/run", tmp_path / "policies") for name in ("a", "b"))
    assert one.parent == other.parent == tmp_path / "policies"
    assert one != other
    assert folder("a/run", tmp_path / "policies") == one, "a later life of a run finds what an earlier one left"
    assert folder("a/run", "null") == tmp_path / "a" / "run" / "policy"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_write_equal_parts_of_the_rounded_weights(num_ranks, tiny_pipelines, tmp_path):
    policy = Trained(tiny_pipelines("sd3"), 1, lora=False)
    target, written, ranks = ExportTarget.from_model(policy.model), [], range(num_ranks)
    plan = plan_weight_files(target, torch.bfloat16, ranks)
    create_part_folders(target, plan, tmp_path / "v1")
    for policy.rank in ranks:
        settings = {"policy": "old", "dtype": torch.bfloat16, "rank": policy.rank}
        written.append(write_weight_files(target, policy, plan, tmp_path / "v1", **settings))
    assert [len(paths) for paths in written] == [1] * num_ranks
    sizes = [path.stat().st_size for (path,) in written]
    assert max(sizes) < 1.3 * min(sizes)
    folder, tensors = tmp_path / "v1" / "transformer", {}
    for (path,) in written:
        tensors |= load_file(path)
    wanted = {n: t for n, t in policy.model.denoiser.state_dict().items() if n not in policy.frozen}
    assert tensors.keys() == wanted.keys()
    assert all(torch.equal(tensors[name], tensor.to(torch.bfloat16)) for name, tensor in wanted.items())
    names = {path.name for (path,) in written}
    others = {"config.json"} | ({"diffusion_pytorch_model.safetensors.index.json"} if num_ranks > 1 else set())
    assert {path.name for path in folder.iterdir()} == names | others


def test_broken_weights_are_not_published(tiny_pipelines, tmp_path):
    """Each fault is a UserError on its rank, and the rank takes the other tensors too, so that no other rank hangs."""
    policy = Trained(tiny_pipelines("sd3"), 1, lora=False)
    target = ExportTarget.from_model(policy.model)
    plan = plan_weight_files(target, torch.bfloat16, [0])
    tensors = [(name, t.clone()) for name, t in policy.iter_full_tensors("old")]
    name, first = tensors[0]
    infinite, wrong = first.clone(), first.flatten()[:1]
    infinite.view(-1)[-1] = float("inf")
    faults = {
        "NaN or infinity": [(name, infinite), *tensors[1:]],
        "contains NaN": [(name, first * float("nan")), *tensors[1:]],
        "empty": [(name, first[:0]), *tensors[1:]],
        "unexpected or duplicate": [tensors[0], *tensors],
        "unexpected": [("other", first), *tensors],
        "1 tensors of the denoiser were not exported": tensors[1:],
        "could not be written": [(name, wrong), *tensors[1:]],
    }
    for i, (message, given) in enumerate(faults.items()):
        num_read = 0

        class Source:
            def iter_full_tensors(self, policy, dtype, owners, given=given):
                nonlocal num_read
                for item in given:
                    num_read += 1
                    yield item

        create_part_folders(target, plan, tmp_path / str(i))
        with pytest.raises(UserError, match=message):
            write_weight_files(target, Source(), plan, tmp_path / str(i), policy="old", dtype=torch.bfloat16, rank=0)
        assert num_read == len(given)
    with pytest.raises(UserError, match="free space or fix the folder"):
        create_part_folders(target, plan, tmp_path / "0")


def test_only_ranks_that_can_write_to_the_folder_write(tmp_path):
    """Rank 1 has another file system, or sees the folder but cannot create files."""

    def world(rank):
        return SimpleNamespace(
            rank=rank,
            is_main=rank == 0,
            broadcast=lambda value: "same",
            run_checked=lambda work, on: work() if rank == 0 else None,
            gather=lambda value: [True, value],
        )

    assert find_writers(world(0), tmp_path / "policy") == [0, 1]
    assert list((tmp_path / "policy").iterdir()) == []
    assert find_writers(world(1), tmp_path / "elsewhere") == [0]
    probe = tmp_path / "shared" / "writers-same"
    probe.mkdir(parents=True)
    assert find_writers(world(1), tmp_path / "shared") == [0, 1]
    assert find_writers(world(1), tmp_path / "shared") == [0]  # the file exists, so it cannot be created
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file cannot be written .*: fix the folder"):
        find_writers(world(0), tmp_path / "file")
