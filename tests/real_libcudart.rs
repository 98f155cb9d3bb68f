//! NVIDIA's own libcudart, without a driver: its copies are seen, and counted as the errors that they are.

use std::process::Command;

use cmt_tests::{Rung, Victim, cmt, libcudart, require};

/// Calls `cudaMemcpy` all the time through the library that is its argument; says at the end how often.
const PROGRAM: &str = r#"
import ctypes, json, os, signal, sys, time
runtime = ctypes.CDLL(sys.argv[1])
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
memory = ctypes.create_string_buffer(1 << 20)
codes = set()
calls = 0
print("ready", os.getpid(), flush=True)
while not stopped:
    codes.add(runtime.cudaMemcpy(memory, memory, len(memory) - 1, 1))
    calls += 1
    time.sleep(0.001)
print(json.dumps({"calls": calls, "codes": sorted(codes)}))
"#;

/// `cudaErrorInsufficientDriver` of libcudart's `driver_types.h`, or `cudaErrorNoDevice`.
const NO_DRIVER: [u64; 2] = [35, 100];

#[test]
fn its_failing_calls_are_counted_as_errors() {
    let Some(_turn) = require(Rung::RealLibcudart) else {
        return;
    };
    let mut python = Command::new("python3");
    python.args(["-c", PROGRAM]).arg(libcudart());
    let victim = Victim::spawn(python);
    let pid = victim.pid.to_string();
    let report = cmt(["trace", &pid, "--for", "2s", "--json"]).json();

    let account = victim.stop();
    let code = account["codes"][0].as_u64().expect("a code");
    assert!(NO_DRIVER.contains(&code), "{account}");

    let process = &report["processes"][0];
    assert_eq!(process["pid"], pid.parse::<u32>().expect("a number"));
    let copies = process["copies"].as_array().expect("copies");
    assert_eq!(copies.len(), 1, "{report:#}");
    let copy = &copies[0];
    assert_eq!(copy["function"], "cudaMemcpy");
    assert_eq!(copy["direction"], "HtoD");
    let calls = copy["calls"].as_u64().expect("calls");
    assert!(calls > 0 && calls <= account["calls"].as_u64().expect("calls"));
    assert_eq!(copy["errors"], calls, "every call fails");
    assert_eq!(copy["bytes"], 0, "nothing was copied");
    assert_eq!(copy["histogram"], serde_json::json!([]), "no latencies");
}
