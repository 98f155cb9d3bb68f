//! The runner of the workloads in `examples/`, by its own tests. What they measure needs a GPU.

use std::process::Command;

#[test]
fn the_runner_of_workloads_tells_wrong_data_failures_and_noise() {
    let folder = cmt_tests::workspace().join("examples/workloads");
    let tested = Command::new("python3")
        .args(["-B", "-m", "unittest"])
        .current_dir(folder)
        .output()
        .expect("python3");
    assert!(
        tested.status.success(),
        "{}",
        String::from_utf8_lossy(&tested.stderr)
    );
}
