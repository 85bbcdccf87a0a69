"""Training beside a child that opens the GPU without computing on it, as Open MPI's orted does through hwloc."""

import ctypes
import os
import pathlib
import subprocess
import sys

import common

GPU_DEVICES = 4  # CL_DEVICE_TYPE_GPU
# Indexes of functions in the table at the beginning of each platform of the ICD loader.
GET_DEVICE_IDS = 2
PLUGIN_OFF = {"opencl": "-opencl", "nvml": "-nvml"}


def open_nvml():
    library = ctypes.CDLL("libnvidia-ml.so.1")
    code = library.nvmlInit_v2()
    if code != 0:
        raise SystemExit(f"bystander.py: NVML cannot be used: error {code}")
    return library


def open_opencl():
    """Lists NVIDIA's OpenCL devices, without a context, by the driver's own library: no ICD loader is needed."""
    library = ctypes.CDLL("libnvidia-opencl.so.1")
    # As a loader does: the library exports the function under no name.
    address_of = library.clGetExtensionFunctionAddress
    address_of.restype, address_of.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p)
    get_platforms = kind(address_of(b"clIcdGetPlatformIDsKHR"))
    platform, count = ctypes.POINTER(ctypes.POINTER(ctypes.c_void_p))(), ctypes.c_uint()
    code = get_platforms(1, ctypes.byref(platform), ctypes.byref(count))
    if code != 0 or not count.value:
        raise SystemExit(f"bystander.py: OpenCL has no platform: error {code}")
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_uint,
        ctypes.c_void_p,
        ctypes.c_void_p,
    )
    get_devices, device = kind(platform[0][GET_DEVICE_IDS]), ctypes.c_void_p()
    code = get_devices(platform, GPU_DEVICES, 1, ctypes.byref(device), ctypes.byref(count))
    if code != 0:
        raise SystemExit(f"bystander.py: OpenCL has no device: error {code}")
    return library


def watch(through, as_hwloc):
    """Body of the child: opens the GPU, records its open files, and ends with its parent."""
    off = PLUGIN_OFF[through] in os.environ.get("HWLOC_COMPONENTS", "").split(",")
    library = None
    if not (as_hwloc and off):
        library = {"nvml": open_nvml, "opencl": open_opencl}[through]()
    # The folder's own descriptor is closed before it is read.
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    held = sorted(os.readlink(link) for link in links if os.path.lexists(link))
    devices = [path for path in held if path.startswith("/dev/nvidia")]
    pathlib.Path("held.txt").write_text("\n".join(devices) + "\n", encoding="utf-8")
    print("ready", flush=True)
    sys.stdin.read()
    del library


def main():
    if sys.argv[1] == "watch":
        watch(sys.argv[2], sys.argv[3] == "True")
        return

    def add(parser):
        parser.add_argument("--through", choices=tuple(PLUGIN_OFF), default="opencl")
        parser.add_argument(
            "--hwloc", action="store_true", help="leave alone what HWLOC_COMPONENTS excludes"
        )

    options = common.parse(__doc__, add)
    torch = common.prepare_torch()
    run = common.Run(options)
    network = common.perceptron(torch, options.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    words = [sys.executable, __file__, "watch", options.through, str(options.hwloc)]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if child.stdout.readline() != "ready\n":
        raise SystemExit("bystander.py: the child did not open the GPU")
    common.train(run, network, optimizer, torch)
    child.stdin.close()
    run.end(weights=common.torch_digest(torch, network.state_dict()), child=child.wait())


if __name__ == "__main__":
    main()
