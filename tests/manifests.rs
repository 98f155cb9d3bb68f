//! What lies in `examples/` is checked by the tools that read it.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use cmt_tests::{Engine, Rung, cmt, free_port, require, require_packages, target, workspace};
use serde_json::Value;

fn examples(folder: &str) -> PathBuf {
    workspace().join("examples").join(folder)
}

/// Runs a tool in a folder of examples, and returns what it said.
#[track_caller]
fn check(folder: &str, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(examples(folder))
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(output.status.success(), "{program} {arguments:?}: {said}");
    said
}

#[test]
fn promtool_accepts_the_configuration_and_the_rules_do_what_they_say() {
    let Some(_turn) = require_packages(Rung::Fleet, &[("promtool", "prometheus")]) else {
        return;
    };
    check(
        "prometheus",
        "promtool",
        &["check", "config", "prometheus.yml"],
    );
    check(
        "prometheus",
        "promtool",
        &["check", "rules", "rules.yml", "alerts.yml"],
    );
    check("prometheus", "promtool", &["test", "rules", "tests.yml"]);
}

#[test]
fn victoria_metrics_accepts_them_too() {
    let engine = Engine::VictoriaMetrics.package();
    let Some(_turn) = require_packages(Rung::Fleet, &[engine, ("vmalert", engine.1)]) else {
        return;
    };
    // Without the last one it takes no files of rules in there, which are for vmalert.
    let arguments = [
        "-promscrape.config=prometheus.yml",
        "-promscrape.config.dryRun",
        "-promscrape.config.strictParse=false",
    ];
    check("prometheus", engine.0, &arguments);
    let arguments = ["-dryRun", "-rule=rules.yml", "-rule=alerts.yml"];
    check("prometheus", "vmalert", &arguments);
}

#[test]
fn systemd_accepts_the_unit_and_its_drop_in_and_finds_it_confined() {
    let needed = [("systemd-analyze", "systemd")];
    let Some(_turn) = require_packages(Rung::Fleet, &needed) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir(folder.path().join("cmt-serve.service.d")).expect("a folder");
    let path = folder.path().join("cmt-serve.service");
    let path = path.to_str().expect("a path");
    for name in ["cmt-serve.service", "cmt-serve.service.d/policy.conf"] {
        let text = fs::read_to_string(examples("systemd").join(name)).expect("an example");
        assert!(
            text.contains("ExecStart=/usr/local/bin/cmt serve"),
            "{text}"
        );
        // Verification wants the program to be there.
        let text = text.replace("/usr/local/bin/cmt", "/bin/true");
        fs::write(folder.path().join(name), text).expect("written");
        let said = check("systemd", "systemd-analyze", &["verify", path]);
        assert_eq!(said, "", "{name}");
        // Exposure from 0 to 10, here in tenths; five capabilities, root and bpf(2) take 2.9 of it, and so they do with a sixth.
        let threshold = ["security", "--offline=true", "--threshold=30", path];
        check("systemd", "systemd-analyze", &threshold);
    }
}

/// A policy that is refused never gets as far as the port.
#[test]
fn cmt_accepts_the_policies_which_do_nothing_yet() {
    let Some(_turn) = require(Rung::Fleet) else {
        return;
    };
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let read = |path: &str| fs::read_to_string(examples(path)).expect("an example");
    let map = read("kubernetes/policy.yaml");
    let (_, within) = map.split_once("  policy.yml: |\n").expect("a policy");
    for text in [read("systemd/policy.yml"), within.replace("\n    ", "\n")] {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(file.path(), &text).expect("written");
        let path = file.path().to_str().expect("a path");
        let refused = cmt(["serve", "--listen", &address, "--policy", path]);
        let sentence = refused.refusal();
        assert!(sentence.starts_with("cannot listen on"), "{sentence}");
        assert!(text.contains("\nmode: observe\n"), "{text}");
    }
}

/// Kubernetes's own schemas, and those of the Prometheus Operator, as PyPI has them.
const SCHEMAS: [&str; 2] = [
    "kubernetes-validate==1.37.0",
    "cloudcoil-models-prometheus-operator==0.80.1.0",
];
const VALIDATE: &str = r#"
import sys, yaml, kubernetes_validate
from cloudcoil.models.prometheus_operator import v1

def lost(given, kept, at=""):
    if isinstance(given, dict):
        for key, value in given.items():
            if key not in kept:
                sys.exit(f"{at}.{key} is no field")
            lost(value, kept[key], f"{at}.{key}")
    elif isinstance(given, list):
        for one, other in zip(given, kept, strict=True):
            lost(one, other, at)

for path in sys.argv[1:]:
    for document in yaml.safe_load_all(open(path)):
        if document["kind"] == "PodMonitor":
            model = v1.PodMonitor.model_validate(document)
            lost(document, model.model_dump(by_alias=True, mode="json"))
        else:
            kubernetes_validate.validate(document, "1.30", strict=True)
        print(document["kind"])
"#;

/// Makes a Python that has the schemas, in a folder that is kept. Returns the file that says that it is done.
fn install_schemas(folder: &Path) -> PathBuf {
    let done = folder.join(SCHEMAS.join("+"));
    let run = |program: &Path, arguments: &[&str]| {
        let status = Command::new(program).args(arguments).status();
        status.is_ok_and(|status| status.success())
    };
    let make = ["-m", "venv", "--clear", folder.to_str().expect("a path")];
    let mut install = vec![
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ];
    install.extend(SCHEMAS);
    if !done.exists()
        && run(Path::new("python3"), &make)
        && run(&folder.join("bin/python"), &install)
    {
        fs::write(&done, "").expect("written");
    }
    done
}

#[test]
fn kubernetes_accepts_the_manifests() {
    let folder = target().join("manifest-schemas");
    let done = install_schemas(&folder);
    let needed = [
        (done.to_str().expect("a path"), "python3-venv, and PyPI"),
        ("kubectl", "kubernetes-client"),
    ];
    let Some(_turn) = require_packages(Rung::Fleet, &needed) else {
        return;
    };
    let patched = tempfile::NamedTempFile::new().expect("a file");
    fs::write(patched.path(), with_the_patch()).expect("written");
    let patched = patched.path().to_str().expect("a path");
    let python = folder.join("bin/python");
    let python = python.to_str().expect("a path");
    let files = ["cmt.yaml", "podmonitor.yaml", "policy.yaml", patched];
    let arguments = [&["-c", VALIDATE], &files[..]].concat();
    let said = check("kubernetes", python, &arguments);
    let kinds: Vec<&str> = said.lines().collect();
    assert_eq!(
        kinds,
        [
            "Namespace",
            "ServiceAccount",
            "DaemonSet",
            "PodMonitor",
            "ConfigMap",
            "DaemonSet"
        ]
    );
}

/// The DaemonSet with `policy-patch.yaml`, merged as `kubectl patch` does in a cluster.
fn with_the_patch() -> String {
    let manifest = fs::read_to_string(examples("kubernetes").join("cmt.yaml")).expect("it");
    let mut documents = manifest.split("\n---\n");
    let set = documents.find(|document| document.contains("kind: DaemonSet"));
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(file.path(), set.expect("a DaemonSet")).expect("written");
    let path = file.path().to_str().expect("a path");
    let patch = ["patch", "--local", "--patch-file", "policy-patch.yaml"];
    let arguments = [&patch[..], &["--output", "yaml", "--filename", path]].concat();
    check("kubernetes", "kubectl", &arguments)
}

/// Case 42: only what is needed. What the patch adds is tried in `tests/rights`.
#[test]
fn the_daemon_set_asks_for_no_more_than_it_needs() {
    let read = |name| fs::read_to_string(examples("kubernetes").join(name)).expect("a manifest");
    let (manifest, patch) = (read("cmt.yaml"), read("policy-patch.yaml"));
    let lines = |text| -> Vec<&str> {
        let lines = str::lines(text).map(str::trim);
        lines.filter(|line| !line.starts_with('#')).collect()
    };
    let (manifest, patch) = (lines(&manifest), lines(&patch));
    let has = |line: &str| manifest.contains(&line);
    assert!(has("drop: [ALL]"));
    assert!(has(
        "add: [BPF, PERFMON, SYS_PTRACE, CHECKPOINT_RESTORE, DAC_READ_SEARCH]"
    ));
    assert!(has("allowPrivilegeEscalation: false") && has("readOnlyRootFilesystem: true"));
    assert!(has("hostPID: true") && has("automountServiceAccountToken: false"));
    for word in [
        "privileged:",
        "procMount",
        "hostPath",
        "hostNetwork",
        "hostIPC",
        "SYS_ADMIN",
    ] {
        let mut both = manifest.iter().chain(&patch);
        assert!(!both.any(|line| line.contains(word)), "{word}");
    }
    // What belongs together goes by the same names.
    let map = read("policy.yaml");
    assert!(patch.contains(&"configMap: {name: cmt-policy}") && map.contains("name: cmt-policy\n"));
    assert!(patch.contains(&"- {name: policy, mountPath: /etc/cmt, readOnly: true}"));
    let listen = r#"args: ["serve", "--listen=$(POD_IP):9469""#;
    assert!(has(&format!("{listen}]")));
    let more = r#", "--policy=/etc/cmt/policy.yml"]"#;
    assert!(patch.contains(&&*format!("{listen}{more}")));
}

/// Every question of the dashboard, with the variables that Grafana puts in.
fn questions(dashboard: &Value) -> Vec<(String, String)> {
    let mut questions = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for question in panel["targets"].as_array().into_iter().flatten() {
            let title = panel["title"].as_str().expect("a title").to_owned();
            let text = question["expr"].as_str().expect("a question");
            questions.push((title, text.to_owned()));
        }
    }
    questions
}

/// Grafana itself is in no registry that can be reached, so its own check is left out; here is what it asks, and that every
/// question is answered with data.
#[test]
fn the_dashboard_asks_what_prometheus_can_answer() {
    let packages = [Engine::Prometheus.package(), ("promtool", "prometheus")];
    let Some(_turn) = require_packages(Rung::Fleet, &packages) else {
        return;
    };
    dashboard(Engine::Prometheus, &[]);
}

#[test]
fn the_dashboard_asks_what_victoria_metrics_can_answer() {
    let packages = [
        Engine::VictoriaMetrics.package(),
        ("promtool", "prometheus"),
    ];
    let Some(_turn) = require_packages(Rung::Fleet, &packages) else {
        return;
    };
    // Else it answers as of half a minute ago.
    dashboard(Engine::VictoriaMetrics, &["-search.latencyOffset=1s"]);
}

fn dashboard(engine: Engine, arguments: &[&str]) {
    let path = examples("grafana").join("cmt-fleet.json");
    let dashboard: Value =
        serde_json::from_str(&fs::read_to_string(path).expect("the dashboard")).expect("JSON");
    let variables = dashboard["templating"]["list"]
        .as_array()
        .expect("variables");
    let folder = tempfile::tempdir().expect("a folder");
    let address = format!("127.0.0.1:{}", free_port());
    let _metrics = serve(&address, &folder);
    let prometheus = engine.start(&[address], arguments);
    let ask = |question: &str| {
        let output = Command::new("promtool")
            .args(["query", "instant", &prometheus.url, question])
            .output()
            .expect("promtool");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{question}: {said}");
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    };
    let started = Instant::now();
    // VictoriaMetrics gives no quantiles of nothing.
    let mut calls = 3;
    while ask("count_over_time(cmt_build_info[1m]) >= 4").is_empty() {
        calls += 1;
        write_metrics(&folder, calls);
        assert!(started.elapsed() < Duration::from_secs(30), "not scraped");
        thread::sleep(Duration::from_millis(200));
    }
    let all = questions(&dashboard);
    assert!(all.len() >= 14, "{all:?}");
    for (title, question) in all {
        let mut text = question.clone();
        for (name, value) in [
            ("${histogram}", "_bucket"),
            ("$__rate_interval", "1m"),
            ("$__range", "1m"),
            ("$size_class", "65536"),
        ] {
            text = text.replace(name, value);
        }
        for variable in variables {
            let name = variable["name"].as_str().expect("a name");
            text = text.replace(&format!("${name}"), ".*");
        }
        assert!(
            !text.contains('$'),
            "{title}: a variable that is not there: {text}"
        );
        assert!(!ask(&text).is_empty(), "{title}: no data for {text}");
    }
}

/// A node's metrics, with so many calls.
fn write_metrics(folder: &tempfile::TempDir, calls: u32) {
    let flow = "direction=\"HtoD\",memory=\"pageable\"";
    let mut text =
        String::from("cmt_build_info{version=\"0\"} 1\ncmt_probe_cost_seconds_total 1\n");
    for name in ["calls", "bytes", "errors", "seconds"] {
        text += &format!("cmt_copy_{name}_total{{{flow},workload=\"pod/a\"}} 5\n");
    }
    text += "cmt_copy_recoverable_seconds_total{workload=\"pod/a\"} 5\ncmt_lost_total{reason=\"map_full\"} 1\n";
    for end in [
        "_bucket{le=\"0.001\",",
        "_bucket{le=\"+Inf\",",
        "_count{",
        "_sum{",
    ] {
        text += &format!("cmt_copy_duration_seconds{end}{flow},size_class=\"65536\"}} {calls}\n");
    }
    // As a whole, whenever it is read.
    let path = folder.path().join("metrics");
    fs::write(path.with_extension("new"), text).expect("written");
    fs::rename(path.with_extension("new"), path).expect("renamed");
}

/// Serves them by Python's own server.
fn serve(address: &str, folder: &tempfile::TempDir) -> Server {
    write_metrics(folder, 3);
    let port = address.rsplit(':').next().expect("a port");
    let child = Command::new("python3")
        .args(["-m", "http.server", port, "--bind", "127.0.0.1"])
        .current_dir(folder.path())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("a server");
    Server(child)
}

/// Ends with this.
struct Server(std::process::Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
