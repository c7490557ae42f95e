import torch

from each_case import check_each
from wfm_ds.engine.device_peaks import DEVICE_PEAKS, find_peak, peak_tflops


@check_each(
    ("name", "bfloat16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100-PCIE-40GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_devices_are_known_by_their_names(name, bfloat16):
    assert find_peak(name).bfloat16 == bfloat16


@check_each("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40", "NVIDIA A1000", "Quadro", ""])
def test_other_devices_have_no_peak(name):
    assert find_peak(name) is None


def test_wider_dtypes_are_never_faster():
    assert all(peak.bfloat16 >= peak.tf32 >= peak.float32 for _, peak in DEVICE_PEAKS)


def test_a_cpu_has_no_peak():
    assert peak_tflops(torch.device("cpu"), torch.bfloat16) is None
