//! The `cmt` command.

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use cmt_agent::bench::copier;
use cmt_agent::commands::{
    attach, bench, detach, doctor, fleet, profile, serve, status, trace, tune,
};
use cmt_agent::{keeper, pipe};

#[cfg(feature = "fuzzing")]
compile_error!("built for fuzzing, cmt carries no payload; leave the feature `fuzzing` out");

/// Shows how much time live GPU processes lose in pageable copies, and takes it back without a restart.
#[derive(Parser)]
#[command(name = "cmt", version, max_term_width = 80)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Trace(trace::Args),
    Attach(attach::Args),
    Detach(detach::Args),
    Status(status::Args),
    Bench(bench::Args),
    Tune(tune::Args),
    Profile(profile::Args),
    Doctor(doctor::Args),
    Serve(serve::Args),
    Fleet(fleet::Args),
    #[command(hide = true)]
    Keeper(keeper::Args),
    #[command(hide = true)]
    BenchCopier(copier::Args),
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Trace(args) => trace::run(args),
        Command::Attach(args) => attach::run(args),
        Command::Detach(args) => detach::run(args),
        Command::Status(args) => status::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Profile(args) => profile::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Fleet(args) => fleet::run(args),
        Command::Keeper(args) => keeper::run(args),
        Command::BenchCopier(args) => copier::run(args),
    }
}

fn main() -> ExitCode {
    env_logger::init();
    let command = Cli::parse().command;
    // The keeper finishes what it has begun, whoever reads its answer.
    if !matches!(command, Command::Keeper(_)) {
        pipe::end_quietly();
    }
    match run(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cmt: {error:#}");
            ExitCode::FAILURE
        }
    }
}
