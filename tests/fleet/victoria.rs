//! VictoriaMetrics in Prometheus's place: it knows no native histograms, and looks back and counts its own way.

use std::fs;
use std::process::Command;

use cmt_tests::{Engine, Rung, cmt, require_packages, workspace};

use crate::access::{assert_let_in, certificates};
use crate::node::{Copy, Form, State};
use crate::past::{self, Told};
use crate::{breaks, check, sides, turn_of, two_nodes, worst_and_losses};

const ENGINE: Engine = Engine::VictoriaMetrics;

/// What nodes copy at a steady pace.
const COPY: Copy = Copy {
    direction: "HtoD",
    memory: "pageable",
    workload: "pod/a",
    bytes: 1 << 20,
    latency_ns: 300_000,
};

#[test]
fn counts_are_exact_and_quantiles_within_their_bucket() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    let (report, truth) = two_nodes(ENGINE, [Form::Classic; 2]);
    assert_eq!(report["histograms"], "classic");
    check(&report, &truth, 4.0);
}

#[test]
fn restarts_and_comings_and_goings_stay_exact() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    breaks(ENGINE, Form::Classic);
}

#[test]
fn the_worst_come_first_and_losses_are_told() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    worst_and_losses(ENGINE);
}

#[test]
fn a_rollout_is_compared_before_and_after() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    sides::rollout(ENGINE, Form::Classic);
}

#[test]
fn two_groups_of_nodes_are_compared() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    sides::groups(ENGINE);
}

#[test]
fn hours_are_counted_exactly() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    past::hours(ENGINE);
}

/// Their names stand in every question, of which VictoriaMetrics takes 16 KiB.
#[test]
fn hundreds_of_nodes_may_go() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    let nodes: Vec<(String, Told)> = (0..250)
        .map(|node| {
            let told = move |minute: u64| {
                (minute < if node < 10 { 20 } else { 9 }).then(|| State {
                    copies: vec![COPY; minute as usize],
                    ..State::default()
                })
            };
            let name = format!("10.{}.30.{node}:9469", 40 + node % 7);
            (name, Box::new(told) as Told)
        })
        .collect();
    let start_s = past::beginning();
    let store = ENGINE.remembering(|per_second| past::samples(start_s, 20, &nodes, per_second));
    let at = (start_s + 19 * 60).to_string();
    let source = ["fleet", "--prometheus", &store.url, "--json"];
    let report = cmt(source.iter().chain(&["--range", "15m", "--at", &at])).json();
    assert_eq!(
        (&report["counts"], &report["nodes"]["broken"]),
        (&"exact".into(), &240.into())
    );
    check(&report, &vec![COPY; 10 * 15 + 240 * 4], 4.0);
    assert_eq!(
        report["worst_nodes"].as_array().map(Vec::len),
        Some(10),
        "{report:#}"
    );
}

#[track_caller]
fn vmalert(arguments: &[&str]) {
    let rules = workspace().join("examples/prometheus");
    let run = Command::new("vmalert")
        .args(arguments)
        .current_dir(rules)
        .output();
    let run = run.expect("vmalert");
    assert!(run.status.success(), "{arguments:?}: {run:?}");
}

/// At a steady pace what vmalert records is the truth. Most of the nodes copy nothing.
#[test]
fn what_vmalert_records_of_a_large_fleet_is_taken() {
    const MINUTES: u64 = 70;
    let packages = [ENGINE.package(), ("vmalert", "victoria-metrics")];
    let Some(_turn) = require_packages(Rung::Fleet, &packages) else {
        return;
    };
    let nodes: Vec<(String, Told)> = (0..1010u64)
        .map(|node| {
            let told = move |minute: u64| {
                let calls = if node < 10 { minute * (node + 1) } else { 0 };
                let copies = vec![COPY; calls as usize];
                Some(State {
                    copies,
                    ..State::default()
                })
            };
            (format!("node-{node}:9469"), Box::new(told) as Told)
        })
        .collect();
    let start_s = past::beginning();
    let store =
        ENGINE.remembering(|per_second| past::samples(start_s, MINUTES, &nodes, per_second));
    let ask = |more: &[&str]| {
        let at = (start_s + (MINUTES - 2) * 60).to_string();
        let source = ["fleet", "--prometheus", &store.url, "--at", &at, "--json"];
        cmt([&source, more].concat())
    };
    let unrecorded = ask(&[]);
    assert!(
        unrecorded.stderr.contains("nothing is recorded"),
        "{unrecorded:?}"
    );
    let unrecorded = unrecorded.json();
    assert_eq!(unrecorded["counts"], "exact");
    let moment = |name: &str| unrecorded[name].as_str().expect("a moment").to_owned();
    vmalert(&[
        "-rule=rules.yml",
        &format!("-datasource.url={}", store.url),
        &format!("-remoteWrite.url={}", store.url),
        &format!("-replay.timeFrom={}", moment("start")),
        &format!("-replay.timeTo={}", moment("end")),
        "-replay.rulesDelay=1ms",
    ]);
    store.settle();
    let recorded = ask(&[]).json();
    assert_eq!(recorded["counts"], "recorded");
    assert_eq!(recorded["nodes"]["reporting"], 1010);
    // 55 calls a minute.
    check(&recorded, &vec![COPY; 55 * 60], 4.0);
    let exact = ask(&["--exact"]).json();
    assert_eq!(exact["counts"], "exact");
    check(&exact, &vec![COPY; 55 * 60], 4.0);
}

#[test]
fn what_cannot_be_answered_is_said_with_its_remedy() {
    let Some(_turn) = turn_of(ENGINE) else { return };
    let store = ENGINE.start(&[], &[]);
    let ask = |path: &str, more: &[&str]| {
        let url = format!("{}{path}", store.url);
        let finished = cmt(["fleet", "--prometheus", &url].iter().chain(more));
        finished.refusal().to_owned()
    };
    for (path, more, part) in [
        ("", "--range=1h", "is cmt serve scraped? See docs/fleet.md"),
        ("", "--match=job=~\"(\"", "missing closing )"),
        (
            "/elsewhere",
            "--range=1h",
            "is no Prometheus query API (HTTP 400",
        ),
    ] {
        let sentence = ask(path, &[more]);
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
    let many = format!("--match=instance!~\"{}\"", "abcdefghij|".repeat(2000));
    let sentence = ask("", &[&many]);
    for part in [
        "could not answer",
        "too long query",
        "-search.maxQueryLen",
        "a --match",
    ] {
        assert!(sentence.contains(part), "{part}: {sentence}");
    }
    assert!(sentence.chars().count() < 1000, "{sentence}");
}

#[test]
fn tls_passwords_and_prefixes() {
    let packages = [ENGINE.package(), ("openssl", "openssl")];
    let Some(_turn) = require_packages(Rung::Fleet, &packages) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name).display().to_string();
    certificates(folder.path());
    let store = ENGINE.start(
        &[],
        &[
            "-tls",
            &format!("-tlsCertFile={}", at("server.pem")),
            &format!("-tlsKeyFile={}", at("server.key")),
            "-httpAuth.username=me",
            "-httpAuth.password=test",
            "-http.pathPrefix=/some/where",
        ],
    );
    let url = store.url.replace("http:", "https:");
    let ask = |path: &str, config: &str| {
        fs::write(at("http.yml"), config).expect("written");
        let url = format!("{url}{path}");
        cmt([
            "fleet",
            "--prometheus",
            &url,
            "--http-config",
            &at("http.yml"),
        ])
    };
    let basic = "basic_auth: {username: me, password: test}\n";
    let tls = "tls_config: {ca_file: ca.pem}\n";
    assert_let_in(&ask("/some/where/", &format!("{basic}{tls}")));
    let wrong = "basic_auth: {username: me, password: secret}\n";
    for (path, config, part) in [
        (
            "/some/where",
            tls.to_owned(),
            "refuses these credentials (HTTP 401); give them with --http-config FILE",
        ),
        ("/some/where", format!("{wrong}{tls}"), "HTTP 401"),
        (
            "/some/where",
            basic.to_owned(),
            "no trusted connection to https://127.0.0.1",
        ),
        (
            "",
            format!("{basic}{tls}"),
            "is no Prometheus query API (HTTP 400",
        ),
    ] {
        let finished = ask(path, &config);
        assert!(finished.refusal().contains(part), "{part}: {finished:?}");
        assert!(!finished.stderr.contains("secret"), "{finished:?}");
    }
}
