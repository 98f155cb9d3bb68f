//! NVIDIA's own libcudart, without a driver: its copies are seen, and counted as the errors that they are.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use cmt_tests::{Rung, Victim, built, cmt, libcudart, require};

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

/// The copy functions among the symbols that a library exports.
fn exported(library: &Path) -> BTreeSet<String> {
    let output = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library)
        .output()
        .expect("run nm");
    assert!(output.status.success(), "{}", library.display());
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(|name| name.split('@').next().unwrap_or(name).to_owned())
        .filter(|name| name.starts_with("cudaMemcpy") || name.starts_with("cuMemcpy"))
        .collect()
}

/// The copy functions that programs built with a `cuda.h` call: `#define cuMemcpyHtoD __CUDA_API_PTDS(cuMemcpyHtoD_v2)`, and
/// those that are declared and not renamed.
fn declared(header: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(header).expect("the header");
    let mut names = BTreeSet::new();
    let mut renamed = BTreeSet::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("#define") {
            continue;
        }
        let (Some(name), Some(becomes)) = (words.next(), words.next()) else {
            continue;
        };
        if !name.starts_with("cuMemcpy") {
            continue;
        }
        renamed.insert(name.to_owned());
        let twin = becomes
            .strip_prefix("__CUDA_API_")
            .and_then(|rest| rest.split_once('('));
        match twin {
            Some((twin, name)) => {
                let name = name.trim_end_matches(')');
                names.insert(name.to_owned());
                names.insert(format!("{name}_{}", twin.to_lowercase()));
            }
            None => {
                names.insert(becomes.to_owned());
            }
        }
    }
    let declared = text
        .split("CUDAAPI ")
        .skip(1)
        .filter_map(|rest| rest.split('(').next())
        .filter(|name| name.starts_with("cuMemcpy") && !renamed.contains(*name))
        .map(str::to_owned);
    names.extend(declared);
    names
}

#[test]
fn every_copy_function_that_nvidia_exports_or_declares_is_traced() {
    let Some(_turn) = require(Rung::RealLibcudart) else {
        return;
    };
    // What seen.rs shows to be counted, each with its bytes.
    let traced = exported(&built().folder.join("libevery.so"));
    let runtime = libcudart();
    let wheels = runtime.ancestors().nth(4).expect("the folder of wheels");
    for version in ["cu13", "cuda_runtime"] {
        let folder = wheels.join("nvidia").join(version);
        let library = fs::read_dir(folder.join("lib"))
            .expect("libraries")
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| path.to_string_lossy().contains("libcudart.so"))
            .expect("a libcudart");
        let exported = exported(&library);
        assert!(
            exported.len() > 40,
            "{} of {}",
            exported.len(),
            library.display()
        );
        let declared = declared(&folder.join("include/cuda.h"));
        assert!(declared.len() > 40, "{declared:?}");
        let missing: Vec<&String> = exported
            .union(&declared)
            .filter(|name| !traced.contains(*name))
            .collect();
        assert!(missing.is_empty(), "{version}: {missing:?}");
    }
}
