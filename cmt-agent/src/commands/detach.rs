//! `cmt detach`.

/// To be written.
#[derive(clap::Args)]
pub struct Args {}

/// To be written.
pub fn run(_args: Args) -> anyhow::Result<()> {
    anyhow::bail!("not written yet")
}
