//! `cmt serve` counts what the processes of a node copy, for as long as it runs, whatever their number; hands it to a
//! Prometheus in each of its formats; and leaves nothing behind.

mod otlp;
mod policy;
mod series;

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::process::Command;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::thread;
use std::time::Duration;

use cmt_tests::{
    Named, Rung, Samples, Serve, Trace, Victim, account_of, attach, built, cmt, cmt_command,
    detach, require, require_packages, until,
};

const LIBRARY: &str = "libcuda.so.1";
/// Every `cmt serve` puts breakpoints into all victims.
static ALONE: RwLock<()> = RwLock::new(());

fn shared() -> RwLockReadGuard<'static, ()> {
    ALONE.read().unwrap_or_else(PoisonError::into_inner)
}

fn alone() -> RwLockWriteGuard<'static, ()> {
    ALONE.write().unwrap_or_else(PoisonError::into_inner)
}

/// It makes both libraries known before others start: those then are traced from their first call on.
fn idle() -> [Victim; 1] {
    [Victim::start("victim-rt", ["--hold"])]
}

#[test]
fn counts_are_those_of_the_victims_in_every_format() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let _idle = idle();
    let serve = Serve::start(&[], &[]);
    let cases = [
        (
            "sv-a",
            "victim-rt",
            "--threads 2 --bytes 4K,64 --calls 2000",
        ),
        ("sv-b", "victim-drv", "--bytes 16K --calls 500 --async"),
        (
            "sv-c",
            "victim-rt",
            "--bytes 16K --calls 100 --fail-every 5 --exact",
        ),
        ("sv-d", "victim-drv", "--bytes 4K --calls 10"),
        ("s\"v\\", "victim-drv", "--bytes 4K --calls 10"),
        ("sv-e", "victim-rt", "--bytes 64K --calls 200 --pause-ms 1"),
    ];
    let mut own = Vec::new();
    for (name, victim, args) in cases {
        let named = Named::new(name, victim);
        let mut counted = [0; 3];
        for _ in 0..3 {
            let victim = named.start(&args.split(' ').collect::<Vec<_>>());
            // Some of it is counted before its end.
            serve.scrape();
            let one = account_of(&victim.finish());
            counted = std::array::from_fn(|index| counted[index] + one[index]);
        }
        own.push((named.workload(), counted));
    }
    for (workload, counted) in &own {
        assert!(
            counted[0] > 0 && counted[2] > 0,
            "{workload} copied nothing"
        );
        until("it counts all calls", || {
            serve.scrape().of_workload(workload)[0] >= counted[0]
        });
        assert_eq!(serve.scrape().of_workload(workload), *counted, "{workload}");
    }
    let families = serve.scrape_protobuf();
    let family = |name: &str| {
        let family = families.iter().find(|family| family.name == name);
        family.unwrap_or_else(|| panic!("no {name}"))
    };
    for (workload, counted) in &own {
        let sums = ["calls", "errors", "bytes"].map(|what| {
            let metrics = &family(&format!("cmt_copy_{what}_total")).metric;
            let of_workload = metrics.iter().filter(|metric| {
                let mut labels = metric.label.iter();
                labels.any(|label| label.name == "workload" && label.value == *workload)
            });
            let values = of_workload.filter_map(|metric| Some(metric.counter.as_ref()?.value));
            values.sum::<f64>() as u64
        });
        assert_eq!(sums, *counted, "{workload}");
    }
    let histograms = &family("cmt_copy_duration_seconds").metric;
    assert!(!histograms.is_empty());
    for metric in histograms {
        let histogram = metric.histogram.as_ref().expect("a histogram");
        assert_eq!(histogram.schema, 3);
        let mut count = 0;
        let native: i64 = histogram
            .positive_delta
            .iter()
            .map(|delta| {
                count += delta;
                count
            })
            .sum();
        let spans: u32 = histogram.positive_span.iter().map(|span| span.length).sum();
        assert_eq!(spans as usize, histogram.positive_delta.len());
        assert_eq!(native as u64, histogram.sample_count, "{metric:?}");
        let last = histogram.bucket.last().expect("a bucket");
        assert_eq!(last.upper_bound, f64::INFINITY);
        assert_eq!(last.cumulative_count, histogram.sample_count);
        assert!(
            histogram
                .bucket
                .is_sorted_by_key(|bucket| bucket.cumulative_count)
        );
    }
    let open = serve.get("/metrics", "application/openmetrics-text;version=1.0.0");
    assert!(
        open.1.contains("application/openmetrics-text"),
        "{}",
        open.1
    );
    let open = String::from_utf8(open.2).expect("text");
    assert!(open.ends_with("# EOF\n"));
    assert!(open.contains("# UNIT cmt_copy_duration_seconds seconds\n"));
}

#[test]
fn counters_never_go_down_and_histograms_add_up() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let serve = Serve::start(&[], &[]);
    let steady = Named::new("sv-steady", "victim-rt");
    let steady = steady.start(&["--bytes", "4K,64K", "--threads", "2"]);
    let brief = Named::new("sv-brief", "victim-drv");
    let mut before = serve.scrape();
    for _ in 0..12 {
        brief.start(&["--bytes", "4K", "--calls", "20"]).finish();
        let now = serve.scrape();
        for (series, value) in &before.0 {
            if series.starts_with("process_") || series.contains("_processes") {
                continue;
            }
            let later = now.0.get(series);
            assert!(later >= Some(value), "{series}: {value}, then {later:?}");
        }
        let buckets = now.sum("cmt_copy_duration_seconds_bucket", &["le=\"+Inf\""]);
        assert_eq!(buckets, now.sum("cmt_copy_duration_seconds_count", &[]));
        before = now;
    }
    steady.stop();
    let calls = before.sum("cmt_copy_calls_total", &[]);
    assert_eq!(calls, before.sum("cmt_copy_function_calls_total", &[]));
}

#[test]
fn thousands_of_processes_leave_totals_and_no_series() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    const COUNT: u64 = 2500;
    const ROUNDS: usize = 6;
    let serve = Serve::start(&[], &[]);
    let calls = |samples: &Samples, function: &str| {
        let label = format!("function=\"{function}\"");
        samples.sum("cmt_copy_function_calls_total", &[&label]) as u64
    };
    let mut held = Vec::new();
    let mut counted = 0;
    for round in 0..ROUNDS {
        let crowd = Victim::start("victim-crowd", [COUNT.to_string()]);
        // Its library is known.
        until("it is traced", || {
            serve.scrape().sum("cmt_traced_processes", &[]) > 0.0
        });
        thread::sleep(Duration::from_millis(1500));
        crowd.signal(libc::SIGUSR1);
        crowd.finish();
        counted += COUNT;
        let mut last = serve.scrape();
        until("all calls are counted", || {
            last = serve.scrape();
            calls(&last, "cuMemcpyHtoA_v2") >= counted
        });
        assert_eq!(calls(&last, "cuMemcpyHtoA_v2"), counted, "round {round}");
        assert_eq!(calls(&last, "cuMemcpyAtoH_v2"), counted, "round {round}");
        assert_eq!(last.sum("cmt_lost_total", &[]), 0.0);
        assert!(last.0.len() < 2000, "{} series", last.0.len());
        let names = last
            .0
            .keys()
            .filter_map(|series| series.split("workload=\"").nth(1));
        let names = names.filter_map(|rest| rest.split('"').next());
        assert!(names.collect::<BTreeSet<_>>().len() <= 33);
        held.push([
            last.sum("process_resident_memory_bytes", &[]) / 1e6,
            last.sum("process_open_fds", &[]),
        ]);
    }
    eprintln!("MB and descriptors after each round: {held:?}");
    // Counts that stayed would be 2.5 KB for each class of a process, 12 MB a round. So much is held for a moment where all of a
    // round end within one turn.
    let ([rss, fds], [rss_later, fds_later]) = (held[0], held[ROUNDS - 1]);
    assert!(rss_later < rss + 32.0, "{held:?}");
    assert!(fds_later < fds + 8.0, "{held:?}");
}

#[test]
fn the_end_takes_all_probes_away() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _alone = alone();
    let mut victim = Victim::start("victim-drv", ["--bytes", "64K", "--pause-ms", "1"]);
    until("no other has probes", || !is_traced(&victim, LIBRARY));
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGKILL] {
        let serve = Serve::start(&[], &[]);
        assert!(is_traced(&victim, LIBRARY), "it has no probes");
        let (status, said, took) = serve.end(signal);
        if signal != libc::SIGKILL {
            assert_eq!((status.code(), &*said), (Some(0), ""), "{status}");
            assert!(took < Duration::from_secs(2), "{took:?}");
        }
        until("the probes are gone", || !is_traced(&victim, LIBRARY));
        assert!(victim.is_alive());
    }
    let trace = Trace::start([victim.pid.to_string()]);
    thread::sleep(Duration::from_millis(200));
    let account = victim.stop();
    assert!(account_of(&account)[0] > 0);
    let (report, _) = trace.finish();
    assert!(report["processes"][0]["copies"][0]["calls"].as_u64() > Some(0));
}

#[test]
fn attached_processes_are_found_again_and_gains_are_estimated() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let named = Named::new("sv-gain", "victim-rt");
    let victim = named.start(&["--bytes", "4M"]);
    let attached = attach(&victim);
    assert_eq!(attached.code, Some(0), "{attached:#?}");
    let link = [("CMT_PRETEND_LINK", "32.0 GT/s PCIe x16")];
    let serve = Serve::start(&link, &[]);
    assert!(serve.scrape().sum("cmt_attached_processes", &[]) >= 1.0);
    detach(&victim);
    let label = format!("workload=\"{}\"", named.workload());
    until("there is an estimate", || {
        serve
            .scrape()
            .sum("cmt_copy_recoverable_seconds_total", &[&label])
            > 0.0
    });
    drop(serve);
    victim.stop();
}

#[test]
fn pages_are_there_to_be_read_only() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let _shared = shared();
    let serve = Serve::start(&[], &[]);
    for (method, path, status) in [
        ("GET", "/metrics", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 200),
        ("POST", "/metrics", 405),
        ("PUT", "/metrics", 405),
        ("DELETE", "/metrics", 405),
        ("POST", "/healthz", 405),
        ("GET", "/", 404),
        ("GET", "/metrics/../../etc/passwd", 404),
        ("GET", "/debug", 404),
    ] {
        assert_eq!(serve.ask(method, path, "*/*").0, status, "{method} {path}");
    }
}

#[test]
fn a_port_in_use_is_an_error() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let refused = cmt(["serve", "--listen", &address]);
    let sentence = refused.refusal();
    assert!(
        sentence.contains(&address) && sentence.contains("in use"),
        "{sentence}"
    );
    assert_eq!(cmt(["serve", "--listen", "nowhere"]).code, Some(2));
}

/// Certificate, key and web config in a folder of their own.
fn web_config() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let made = Command::new("openssl")
        .args([
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1",
        ])
        .args(["-subj", "/CN=cmt", "-addext", "subjectAltName=IP:127.0.0.1"])
        .args(["-keyout", "key.pem", "-out", "cert.pem"])
        .current_dir(folder.path())
        .output()
        .expect("run openssl");
    assert!(made.status.success(), "{made:?}");
    // Of "open sesame".
    let hash = "$2b$04$abcdefghijklmnopqrstuu/LVz6MZlItEy42I2juLihZ66HnQx/cy";
    let config = format!(
        "tls_server_config:\n  cert_file: cert.pem\n  key_file: key.pem\nbasic_auth_users:\n  alice: {hash}\n"
    );
    fs::write(folder.path().join("web.yml"), config).expect("write");
    folder
}

#[test]
fn a_web_config_encrypts_and_asks_for_a_password() {
    let packages = [("openssl", "openssl"), ("curl", "curl")];
    let Some(_turn) = require_packages(Rung::StandIn, &packages) else {
        return;
    };
    let _shared = shared();
    let folder = web_config();
    let config = folder.path().join("web.yml");
    let serve = Serve::start_unready(&[], &["--web-config", config.to_str().expect("text")]);
    let address = serve.address.strip_prefix("https://").expect("encrypted");
    let ask = |url: String, args: &[&str]| {
        let asked = Command::new("curl")
            .args([
                "-s",
                "-m",
                "20",
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                "--cacert",
            ])
            .arg(folder.path().join("cert.pem"))
            .args(args)
            .arg(url)
            .output()
            .expect("run curl");
        String::from_utf8(asked.stdout).expect("text")
    };
    until("it is ready", || {
        ask(format!("https://{address}/readyz"), &[]) == "200"
    });
    for (args, code) in [
        (&["-u", "alice:open sesame"][..], "200"),
        (&["-u", "alice:open sesame", "--http1.1"], "200"),
        (&[], "401"),
        (&["-u", "alice:sesame"], "401"),
        (&["-u", "bob:open sesame"], "401"),
    ] {
        assert_eq!(
            ask(format!("https://{address}/metrics"), args),
            code,
            "{args:?}"
        );
    }
    let plain = ask(
        format!("http://{address}/metrics"),
        &["-u", "alice:open sesame"],
    );
    assert_eq!(plain, "000", "without encryption");
}

#[test]
fn what_cannot_work_is_an_error_before_anything_is_touched() {
    let Some(_turn) = require_packages(Rung::StandIn, &[("openssl", "openssl")]) else {
        return;
    };
    let _alone = alone();
    let mut victim = Victim::start("victim-drv", ["--bytes", "64K", "--pause-ms", "1"]);
    until("no other has probes", || !is_traced(&victim, LIBRARY));
    let before = victim.settled();
    let folder = web_config();
    let path = folder.path().join("web.yml");
    let path = path.to_str().expect("text");
    let cert_only = "tls_server_config: {cert_file: cert.pem, key_file: missing.pem}";
    let unlike = "tls_server_config: {cert_file: cert.pem, key_file: cert.pem}";
    for (config, word) in [
        ("tls_server_config: 3", "no web config"),
        ("basic_auth_user: {alice: x}", "basic_auth_user"),
        ("basic_auth_users: {alice: sesame}", "alice"),
        (cert_only, "missing.pem"),
        (unlike, "key"),
    ] {
        fs::write(path, config).expect("write");
        let refused = cmt(["serve", "--listen", "127.0.0.1:0", "--web-config", path]);
        assert!(refused.refusal().contains(word), "{refused:?}");
    }
    let refused = cmt(["serve", "--web-config", "/nowhere/web.yml"]);
    assert!(
        refused.refusal().contains("/nowhere/web.yml"),
        "{refused:?}"
    );
    let mut powerless = Command::new("setpriv");
    powerless
        .args([
            "--bounding-set=-all",
            "--inh-caps=-all",
            "--ambient-caps=-all",
        ])
        .arg(cmt_command([""; 0]).get_program())
        .args(["serve", "--listen", "127.0.0.1:0"]);
    let refused = powerless.output().expect("run setpriv");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("CAP_"), "{said}");
    victim.assert_untouched(&before);
}

#[test]
fn libraries_that_came_and_went_leave_no_descriptors() {
    let Some(_turn) = require(Rung::StandIn) else {
        return;
    };
    // Others would place probes, too.
    let _alone = alone();
    let serve = Serve::start(&[], &[]);
    let crowd = |count: usize| {
        for _ in 0..count {
            // A library of its own, as in a container of its own.
            let folder = tempfile::tempdir().expect("a folder");
            let library = folder.path().join("libevery.so");
            fs::copy(built().folder.join("libevery.so"), library).expect("copy");
            let mut command = Command::new(built().victim("victim-crowd"));
            command.arg("1").env("LD_LIBRARY_PATH", folder.path());
            let victim = Victim::spawn(command);
            until("it is traced", || is_traced(&victim, "libevery.so"));
            // If it ended while the last of its probes are placed, none would stay.
            thread::sleep(Duration::from_millis(200));
            victim.signal(libc::SIGUSR1);
            victim.finish();
        }
        // It sweeps every other second.
        thread::sleep(Duration::from_secs(3));
        serve.scrape().sum("process_open_fds", &[])
    };
    let none = crowd(0);
    let one = crowd(1) - none;
    let many = crowd(45) - none;
    assert!(one > 0.0);
    assert!(
        many < 34.0 * one,
        "{one} descriptors for one, {many} for 46"
    );
}

/// Whether a breakpoint is in a victim's library: its code then is not what the file says.
fn is_traced(victim: &Victim, library: &str) -> bool {
    let maps = fs::read_to_string(format!("/proc/{}/maps", victim.pid)).expect("its maps");
    let line = maps
        .lines()
        .find(|line| line.contains(" r-xp ") && line.ends_with(library));
    let fields: Vec<&str> = line.expect("its code").split_ascii_whitespace().collect();
    let hex = |text: &str| u64::from_str_radix(text, 16).expect("hex");
    let (start, end) = fields[0].split_once('-').expect("a range");
    let file = fs::read(fields[5]).expect("read");
    let wanted = &file[hex(fields[2]) as usize..];
    let wanted = &wanted[..wanted.len().min((hex(end) - hex(start)) as usize)];
    let mut code = vec![0; wanted.len()];
    let memory = fs::File::open(format!("/proc/{}/mem", victim.pid)).expect("its memory");
    memory.read_exact_at(&mut code, hex(start)).expect("read");
    code != wanted
}
