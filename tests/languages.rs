//! Programs whose runtime has threads, stacks and signals of its own: Python, Go, Java.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cmt_tests::{Rung, Victim, built, cycles, require_packages, workspace};

/// No runtime ends with this code by itself.
const CODE: i32 = 42;

/// Two threads copy, one keeps the runtime busy; after ten cycles all bytes were right and the exit code is the program's.
#[track_caller]
fn survives(mut command: Command) {
    command.arg(CODE.to_string());
    command.env("LD_LIBRARY_PATH", &built().folder);
    let mut victim = Victim::spawn(command);
    cycles(&mut victim, 10);
    victim.signal(libc::SIGTERM);
    let (lines, status) = victim.transcript(|_| ());
    let last = lines
        .last()
        .unwrap_or_else(|| panic!("no account: {status}"));
    let account: serde_json::Value = serde_json::from_str(last).expect("an account");
    assert_eq!(account["mismatches"], 0, "{account}");
    assert!(account["copies"].as_u64() > Some(0), "{account}");
    assert_eq!(status.code(), Some(CODE), "{status}");
}

fn source(name: &str) -> PathBuf {
    workspace().join("tests/victims/languages").join(name)
}

#[track_caller]
fn build(command: &mut Command) {
    let status = command.status();
    let status = status.unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}

#[test]
fn python() {
    let Some(_turn) = require_packages(Rung::StandIn, &[("python3", "python3")]) else {
        return;
    };
    let mut command = Command::new("python3");
    command.arg(source("copies.py"));
    survives(command);
}

#[test]
fn go() {
    let needed = [("go", "golang-go"), ("gcc", "gcc")];
    let Some(_turn) = require_packages(Rung::StandIn, &needed) else {
        return;
    };
    let folder = &built().folder;
    let program = folder.join("copies-go");
    let mut compiler = Command::new("go");
    compiler
        .args(["build", "-o"])
        .arg(&program)
        .arg(source("copies.go"));
    let libraries = format!(
        "-L{} -lcudart -Wl,--allow-shlib-undefined",
        folder.display()
    );
    compiler
        .env("CGO_LDFLAGS", libraries)
        .env("CGO_ENABLED", "1");
    // Neither the user's settings nor a folder of the user's.
    compiler.env("GOENV", "off").env("GO111MODULE", "off");
    compiler
        .env("GOFLAGS", "")
        .env("GOCACHE", folder.join("go-cache"));
    compiler.env("CGO_LDFLAGS_ALLOW", ".*");
    build(&mut compiler);
    survives(Command::new(program));
}

#[test]
fn java() {
    let needed = [
        ("java", "openjdk-17-jre-headless"),
        ("javac", "openjdk-17-jdk-headless"),
    ];
    let Some(_turn) = require_packages(Rung::StandIn, &needed) else {
        return;
    };
    let home = java_home();
    let classes = built().folder.join("classes");
    fs::create_dir_all(&classes).expect("create a folder for classes");
    let mut compiler = Command::new(home.join("bin/javac"));
    build(compiler.arg("-d").arg(&classes).arg(source("Copies.java")));
    let mut compiler = Command::new("gcc");
    compiler.args(["-O2", "-Wall", "-Werror", "-shared", "-fPIC", "-o"]);
    compiler
        .arg(classes.join("libcopies_jni.so"))
        .arg(source("copies_jni.c"));
    for folder in ["include", "include/linux"] {
        compiler.arg("-I").arg(home.join(folder));
    }
    compiler.arg("-L").arg(&built().folder);
    compiler.args(["-lcudart", "-Wl,--allow-shlib-undefined"]);
    build(&mut compiler);
    let mut command = Command::new(home.join("bin/java"));
    command
        .args(["-Xmx256m", "-Xcheck:jni", "-cp"])
        .arg(&classes);
    let mut path = std::ffi::OsString::from("-Djava.library.path=");
    path.push(&classes);
    command.arg(path).arg("Copies");
    survives(command);
}

/// The folder of the JDK that `javac` belongs to.
fn java_home() -> PathBuf {
    let path = std::env::var_os("PATH").expect("a search path");
    let javac = std::env::split_paths(&path)
        .map(|folder| folder.join("javac"))
        .find(|path| path.exists())
        .and_then(|path| fs::canonicalize(path).ok())
        .expect("there is a javac");
    let home = javac.parent().and_then(Path::parent);
    home.expect("javac lies in bin").to_path_buf()
}
