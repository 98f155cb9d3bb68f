//! The comparison as one page of HTML that needs no network.

use crate::compare::{self, Comparison};
use crate::injector::Attached;
use crate::origin::Origin;
use crate::target::Target;

pub(crate) const STYLE: &str = include_str!("html/style.css");

/// The page: a table with one bar a class and window, both on the scale of the fastest, and what else there is to say.
pub fn page(
    target: &Target,
    attached: &Attached,
    comparison: &Comparison,
    notes: &[String],
) -> String {
    let most = comparison
        .rows()
        .flat_map(|row| [row.gbps_before, row.gbps_after])
        .flatten()
        .fold(f64::MIN_POSITIVE, f64::max);
    let bar = |class: &str, calls: u64, p50: Option<u64>, gbps: Option<f64>| match gbps {
        None => format!("<td class=none colspan=4>no {class} copies</td>"),
        Some(gbps) => format!(
            "<td class=bar><div class={class} style=\"width:{:.1}%\"></div></td><td>{gbps:.2}</td><td>{}</td><td>{calls}</td>",
            gbps / most * 100.0,
            p50.map_or("-".to_owned(), compare::duration),
        ),
    };
    let rows: String = comparison
        .verdicts()
        .map(|(row, verdict)| {
            format!(
                "<tr><th rowspan=2>{} {}</th><td>before</td>{}<th rowspan=2>{}</th></tr><tr><td>after</td>{}</tr>\n",
                row.direction,
                compare::bytes(row.size_class_bytes),
                bar("before", row.calls_before, row.p50_before_ns, row.gbps_before),
                verdict,
                bar("after", row.calls_after, row.p50_after_ns, row.gbps_after),
            )
        })
        .collect();
    let table = match rows.is_empty() {
        true => "<p>No copy with pageable memory was seen to compare.</p>\n".to_owned(),
        false => format!(
            "<table><thead><tr><th>copies<th><th>GB/s<th><th>median<th>calls<th>speed-up</tr></thead>\n{rows}</table>\n"
        ),
    };
    let notes: String = comparison
        .moved_waits()
        .iter()
        .chain(notes)
        .map(|note| format!("<p>{}</p>\n", escape(note)))
        .collect();
    let body = format!(
        "<h1>{comm} <small>process {pid}</small></h1>\n\
         <p>{patched} functions patched in {took:.0} ms; {threads} threads were stopped for {pause:.1} ms.</p>\n\
         {table}{notes}",
        pid = target.pid,
        comm = escape(&target.comm),
        patched = attached.patched.len(),
        took = attached.took.as_secs_f64() * 1e3,
        threads = attached.commit.threads,
        pause = attached.commit.pause.as_secs_f64() * 1e3,
    );
    let title = format!("cmt attach {}", target.pid);
    document(&title, STYLE, &body, Some(&Origin::now()))
}

/// A whole page around a body; its end says where and when that was made, where that is known.
pub(crate) fn document(title: &str, style: &str, body: &str, origin: Option<&Origin>) -> String {
    let origin = origin.map_or_else(String::new, |origin| {
        format!("<p><small>{}</small></p>\n", escape(&origin.to_string()))
    });
    format!(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content=\"width=device-width\">\n\
         <title>{title}</title><style>{style}</style>\n{body}{origin}</html>\n"
    )
}

/// Text as it may stand between tags.
pub(crate) fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
