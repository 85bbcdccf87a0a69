//! The fake GPU itself: its memory lives as long as somebody holds it.

#[path = "common/fake_gpu.rs"]
mod fake_gpu;

use fake_gpu::FakeGpu;

#[test]
fn the_library_is_built_once_and_a_new_gpu_is_empty() {
    let gpu = FakeGpu::new();
    assert!(fake_gpu::library().join("libcuda.so.1").exists());
    assert!(fake_gpu::library().join("libnvidia-ml.so.1").exists());
    assert_eq!(gpu.used_bytes(0), 0);
}
