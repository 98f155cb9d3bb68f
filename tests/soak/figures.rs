//! What a long run found, as rows of a table: `| what | figure |`. `cargo xtask test soak` repeats them at the end.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

use serde_json::Value;

/// Prints one figure.
pub fn row(what: impl Display, figure: impl Display) {
    println!("| {what} | {figure} |");
}

/// Median, 99th percentile and longest of some times, in ms.
pub fn times(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let Some(&longest) = times.last() else {
        return "none".to_owned();
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let at = |share: usize| times[(times.len() - 1) * share / 100];
    format!(
        "{:.1} / {:.1} / {:.1} ms (median / p99 / longest)",
        ms(at(50)),
        ms(at(99)),
        ms(longest)
    )
}

/// What a victim has copied and checked, by its account.
#[derive(Clone, Copy, Default)]
pub struct Checked {
    copies: u64,
    bytes: u64,
}

impl Checked {
    /// Adds what a victim says when it ends.
    pub fn add(&mut self, account: &Value) {
        let functions = account["functions"].as_object().into_iter().flatten();
        self.copies += functions
            .filter_map(|(_, function)| function["calls"].as_u64())
            .sum::<u64>();
        self.bytes += account["verified_bytes"].as_u64().unwrap_or(0);
    }
}

impl Display for Checked {
    fn fmt(&self, f: &mut Formatter) -> fmt::Result {
        let gb = self.bytes as f64 / 1e9;
        write!(f, "{} copies, {gb:.1} GB read back", self.copies)
    }
}
