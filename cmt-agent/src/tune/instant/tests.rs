//! Estimates for machines that are made up.

use cmt_common::control::{Plan, cores};

use super::*;
use crate::topology::tests::made_up;

const GPU: &str = "sys/bus/pci/devices/0000:01:00.0";

/// A machine by the files that tell of it, after those of a GPU on a fast link.
fn machine(files: &[(&str, &str)]) -> (Host, Estimate) {
    let gpu = [
        ("vendor", "0x10de"),
        ("class", "0x030200"),
        ("device", "0x2335"),
        ("max_link_speed", "32.0 GT/s PCIe"),
        ("max_link_width", "16"),
        ("current_link_speed", "2.5 GT/s PCIe"),
        ("current_link_width", "16"),
    ]
    .map(|(name, text)| (format!("{GPU}/{name}"), text));
    let gpu: Vec<(&str, &str)> = gpu.iter().map(|(path, text)| (&**path, *text)).collect();
    let root = made_up(&[&gpu, files].concat());
    let host = Host::under(root.path());
    let estimate = estimate(&host);
    (host, estimate)
}

/// `online` CPUs, of which the process may use `allowed`.
fn cpus<'a>(online: &'a str, allowed: &'a str) -> [(&'a str, &'a str); 2] {
    [
        ("sys/devices/system/cpu/online", online),
        ("proc/self/status", allowed),
    ]
}

/// Pairs of siblings: CPU `n` and CPU `n + cores`.
fn siblings(cores: u32) -> Vec<(String, String)> {
    (0..2 * cores)
        .map(|id| {
            let core = id % cores;
            let path = format!("sys/devices/system/cpu/cpu{id}/topology/thread_siblings_list");
            (path, format!("{core},{}", core + cores))
        })
        .collect()
}

fn most_threads(plan: &Plan) -> u32 {
    let rows = plan.htod.iter().chain(&plan.dtoh);
    rows.map(|row| row.threads).max().unwrap_or(0)
}

#[test]
fn a_plain_machine_gets_the_engines_own_rows() {
    let (host, estimate) = machine(&cpus("0-15", "Cpus_allowed_list:\t0-15"));
    assert_eq!(estimate.threads, 16);
    assert_eq!(estimate.plan, cmt_copy::plan::estimate(16));
    assert_eq!((estimate.declined, host.unified), (None, None));
    assert_eq!(host.machine.gpu.as_deref(), Some("PCI 10de:2335"));
    assert_eq!(host.machine.cpus, 16);
    let link = host.machine.link.expect("a link");
    assert_eq!((link.generation, link.width), (Some(5), 16));
}

#[test]
fn taskset_and_quota_bound_the_threads() {
    let (_, pinned) = machine(&cpus("0-15", "Cpus_allowed_list:\t3,7"));
    assert_eq!((pinned.threads, most_threads(&pinned.plan)), (2, 2));
    let all = cpus("0-15", "Cpus_allowed_list:\t0-15");
    for (max, threads, stages) in [
        ("150000 100000", 1, false),
        ("250000 100000", 2, true),
        ("max 100000", 16, true),
    ] {
        let groups = [
            ("proc/self/cgroup", "0::/box/inner"),
            // The tightest on the way counts.
            ("sys/fs/cgroup/box/cpu.max", max),
            ("sys/fs/cgroup/box/inner/cpu.max", "max 100000"),
        ];
        let (host, estimate) = machine(&[&all[..], &groups].concat());
        assert_eq!(estimate.threads, threads, "{max}");
        assert_eq!(estimate.plan != Plan::NONE, stages, "{max}");
        assert_eq!(estimate.declined.is_some(), !stages, "{max}");
        assert_eq!(host.machine.quota.is_some(), !max.starts_with("max"));
    }
}

#[test]
fn one_cpu_stages_nothing_and_two_do() {
    let (_, one) = machine(&cpus("0", "Cpus_allowed_list:\t0"));
    assert_eq!((one.threads, one.plan), (1, Plan::NONE));
    let why = one.declined.expect("a reason");
    assert!(
        why.contains("1 CPU may be used, and staging takes two"),
        "{why}"
    );
    let (_, two) = machine(&cpus("0-1", "Cpus_allowed_list:\t0-1"));
    assert_eq!((two.threads, most_threads(&two.plan)), (2, 2));
}

#[test]
fn half_of_the_siblings_count() {
    for (cores, online, allowed, threads) in [
        (8, "0-15", "Cpus_allowed_list:\t0-15", 12),
        (1, "0-1", "Cpus_allowed_list:\t0-1", 2),
        // One of each pair.
        (8, "0-15", "Cpus_allowed_list:\t0-7", 8),
    ] {
        let siblings = siblings(cores);
        let mut files = cpus(online, allowed).to_vec();
        files.extend(siblings.iter().map(|(path, text)| (&**path, &**text)));
        let (_, estimate) = machine(&files);
        assert_eq!(estimate.threads, threads, "{cores} {allowed}");
    }
}

#[test]
fn a_hybrid_laptop_leaves_its_slow_cores_alone() {
    let kinds = [
        ("sys/devices/cpu_core/cpus", "0-5"),
        ("sys/devices/cpu_atom/cpus", "6-13"),
    ];
    let (_, estimate) = machine(&[&cpus("0-13", "Cpus_allowed_list:\t0-13")[..], &kinds].concat());
    assert_eq!(
        (estimate.threads, estimate.plan.cores),
        (6, cores::PERFORMANCE)
    );
    // Unless they are all that there is.
    let (_, slow) = machine(&[&cpus("0-13", "Cpus_allowed_list:\t6-13")[..], &kinds].concat());
    assert_eq!((slow.threads, slow.plan.cores), (8, cores::ALL));
    let (_, one) = machine(&[&cpus("0-13", "Cpus_allowed_list:\t5-13")[..], &kinds].concat());
    assert_eq!((one.threads, one.plan.cores), (9, cores::ALL));
}

#[test]
fn little_cores_of_an_arm_are_left_alone() {
    let capacities: Vec<(String, &str)> = (0..8)
        .map(|id| {
            let capacity = if id < 4 { "400" } else { "1024" };
            (
                format!("sys/devices/system/cpu/cpu{id}/cpu_capacity"),
                capacity,
            )
        })
        .collect();
    let mut files = cpus("0-7", "Cpus_allowed_list:\t0-7").to_vec();
    files.push(("proc/cpuinfo", "CPU implementer\t: 0x41\nCPU part\t: 0xd40"));
    files.extend(capacities.iter().map(|(path, text)| (&**path, *text)));
    let (host, estimate) = machine(&files);
    assert_eq!(
        (estimate.threads, estimate.plan.cores),
        (4, cores::PERFORMANCE)
    );
    let cpu = host.machine.cpu.expect("a processor");
    assert_eq!(cpu, "ARM implementer 0x41, part 0xd40");
}

#[test]
fn helpers_stay_at_the_gpus_node() {
    let node = format!("{GPU}/numa_node");
    let nodes = |gpu: &'static str| {
        vec![
            ("sys/devices/system/node/online", "0-1"),
            ("sys/devices/system/node/node0/cpulist", "0-3"),
            ("sys/devices/system/node/node1/cpulist", "4-15"),
            (&*node, gpu),
        ]
    };
    for (gpu, allowed, threads, choice) in [
        ("1", "0-15", 12, cores::GPU_NODE),
        ("0", "0-15", 4, cores::GPU_NODE),
        // Not known, and hardly any of it ours.
        ("-1", "0-15", 16, cores::ALL),
        ("0", "3-15", 13, cores::ALL),
    ] {
        let allowed = format!("Cpus_allowed_list:\t{allowed}");
        let files = [&cpus("0-15", &allowed)[..], &nodes(gpu)].concat();
        let (_, estimate) = machine(&files);
        assert_eq!(
            (estimate.threads, estimate.plan.cores),
            (threads, choice),
            "{gpu} {allowed}"
        );
    }
}

#[test]
fn machines_of_one_memory_are_not_guessed_at() {
    const NAME: &str = "proc/driver/nvidia/gpus/0000:01:00.0/information";
    let plain = cpus("0-15", "Cpus_allowed_list:\t0-15");
    for (path, text, is_unified) in [
        (NAME, "Model: \t\t NVIDIA GH200 480GB\nIRQ: 7", true),
        (NAME, "Model: \t\t NVIDIA GB200", true),
        (NAME, "Model: \t\t NVIDIA GB300", true),
        (NAME, "Model: \t\t NVIDIA GB10", true),
        (NAME, "Model: \t\t NVIDIA H200", false),
        (NAME, "Model: \t\t NVIDIA GB102-something", false),
        ("proc/device-tree/model", "NVIDIA Jetson AGX Orin\0", true),
        (
            "sys/class/dmi/id/product_name",
            "NVIDIA Grace CPU P4352",
            true,
        ),
    ] {
        let (host, estimate) = machine(&[&plain[..], &[(path, text)]].concat());
        assert_eq!(host.unified.is_some(), is_unified, "{text}");
        assert_eq!(estimate.plan == Plan::NONE, is_unified, "{text}");
        if is_unified {
            let why = estimate.declined.expect("a reason");
            assert!(why.contains("--search fast or full"), "{why}");
        }
    }
}

#[test]
fn a_machine_that_says_nothing_is_estimated_all_the_same() {
    let root = made_up(&[]);
    let host = Host::under(root.path());
    let estimate = estimate(&host);
    assert_eq!((estimate.threads, estimate.plan), (1, Plan::NONE));
    assert_eq!(host.machine.gpu, None);
}
