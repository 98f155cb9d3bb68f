//! Tasks around the workspace: `cargo xtask TASK`.

mod apt;
mod build_ebpf;
mod demo;
mod dist;
mod gpu;
mod instructions;
mod test;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks around the workspace
#[derive(Parser)]
#[command(name = "cargo xtask", max_term_width = 80)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    BuildEbpf(build_ebpf::Args),
    Demo(demo::Args),
    Dist(dist::Args),
    /// Run the test ladder, or the long runs
    Test(test::Args),
    /// Lay everything that a GPU machine needs into one folder
    Gpu,
    /// Count the instructions that a patched function adds to a small copy
    Instructions,
}

fn run(task: Task) -> anyhow::Result<ExitCode> {
    match task {
        Task::BuildEbpf(args) => build_ebpf::run_task(&args)?,
        Task::Demo(args) => demo::run(args)?,
        Task::Dist(args) => dist::run_task(&args)?,
        Task::Test(args) => return test::run_task(&args),
        Task::Gpu => gpu::bundle()?,
        Task::Instructions => instructions::run_task()?,
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    run(Cli::parse().task).unwrap_or_else(|error| {
        eprintln!("xtask: {error:#}");
        ExitCode::FAILURE
    })
}
