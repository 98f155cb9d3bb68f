//! Who asks: credentials and TLS, as a Prometheus of our own wants them.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::thread;

use cmt_tests::{Finished, Prometheus, Rung, cmt, require, require_packages};

/// Of the password `test`, from Prometheus's documentation.
const BCRYPT: &str = "$2b$12$hNf2lSsxfm0.i4a.1kVpSOVyBCfIB51VRjgBUyv6kdnyTlgWj81Ay";

fn openssl(folder: &Path, line: &str) {
    let made = Command::new("openssl")
        .args(line.split(' '))
        .current_dir(folder)
        .output()
        .expect("openssl");
    assert!(made.status.success(), "{line}: {made:?}");
}

/// A CA, and what it signed for the server and for the client.
pub fn certificates(folder: &Path) {
    openssl(
        folder,
        "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=ca -keyout ca.key -out ca.pem",
    );
    fs::write(folder.join("names"), "subjectAltName=IP:127.0.0.1\n").expect("written");
    for name in ["server", "client"] {
        openssl(
            folder,
            &format!(
                "req -newkey rsa:2048 -nodes -subj /CN={name} -keyout {name}.key -out {name}.csr"
            ),
        );
        openssl(
            folder,
            &format!(
                "x509 -req -in {name}.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 1 -extfile names -out {name}.pem"
            ),
        );
    }
}

/// What a server that lets one in answers to a question about no nodes.
#[track_caller]
pub fn assert_let_in(finished: &Finished) {
    let sentence = finished.refusal();
    assert!(sentence.contains("is cmt serve scraped?"), "{sentence}");
}

#[test]
fn tls_passwords_and_prefixes() {
    let packages = [("prometheus", "prometheus"), ("openssl", "openssl")];
    let Some(_turn) = require_packages(Rung::Fleet, &packages) else {
        return;
    };
    let folder = tempfile::tempdir().expect("a folder");
    let at = |name: &str| folder.path().join(name);
    certificates(folder.path());
    fs::write(
        at("web.yml"),
        format!(
            "tls_server_config: {{cert_file: server.pem, key_file: server.key, client_ca_file: ca.pem, \
             client_auth_type: RequireAndVerifyClientCert}}\nbasic_auth_users: {{me: \"{BCRYPT}\"}}\n"
        ),
    )
    .expect("written");
    let web = format!("--web.config.file={}", at("web.yml").display());
    let prometheus = Prometheus::start_with(&[], &[&web, "--web.route-prefix=/some/where"]);
    let url = prometheus.url.replace("http:", "https:") + "/some/where/";
    let ask = |config: &str| {
        fs::write(at("http.yml"), config).expect("written");
        let path = at("http.yml");
        let path = path.to_str().expect("a path");
        cmt(["fleet", "--prometheus", &url, "--http-config", path])
    };
    let basic = "basic_auth: {username: me, password_file: password}\n";
    fs::write(at("password"), "test\n").expect("written");
    let tls = "tls_config: {ca_file: ca.pem, cert_file: client.pem, key_file: client.key}\n";
    assert_let_in(&ask(&format!("{basic}{tls}")));
    let blind =
        "tls_config: {insecure_skip_verify: true, cert_file: client.pem, key_file: client.key}\n";
    assert_let_in(&ask(&format!("{basic}{blind}")));

    let refused = ask(tls);
    assert!(
        refused
            .refusal()
            .contains("refuses these credentials (HTTP 401)"),
        "{refused:?}"
    );
    assert!(
        refused.refusal().contains("--http-config FILE"),
        "{refused:?}"
    );
    let wrong = ask(&format!(
        "basic_auth: {{username: me, password: secret}}\n{tls}"
    ));
    assert!(wrong.refusal().contains("HTTP 401"), "{wrong:?}");
    assert!(!wrong.stderr.contains("secret"), "{wrong:?}");
    let untrusted = ask(&format!(
        "{basic}tls_config: {{cert_file: client.pem, key_file: client.key}}"
    ));
    assert!(
        untrusted
            .refusal()
            .contains("no trusted connection to https://127.0.0.1"),
        "{untrusted:?}"
    );
    // Without a certificate of its own it is cut off, sooner or later.
    let nobody = ask(&format!("{basic}tls_config: {{ca_file: ca.pem}}"));
    assert!(nobody.refusal().contains("https://127.0.0.1"), "{nobody:?}");
}

/// Mimir knows its tenants by a header.
#[test]
fn headers_are_sent() {
    let Some(_turn) = require(Rung::Fleet) else {
        return;
    };
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("its address"));
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut buffer = [0; 8192];
            let length = stream.read(&mut buffer).expect("a question");
            let head = String::from_utf8_lossy(&buffer[..length]).to_lowercase();
            let status = match head.contains("\r\nx-scope-orgid: one|two\r\n") {
                true => "200 OK",
                false => "401 Unauthorized",
            };
            let body = r#"{"status":"success","data":{"resultType":"vector","result":[]}}"#;
            let (close, length) = ("Connection: close", body.len());
            let answer =
                format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{close}\r\n\r\n{body}");
            // Whoever asked may have gone.
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("http.yml");
    let ask = |config: &str| {
        fs::write(&path, config).expect("written");
        let path = path.to_str().expect("a path");
        cmt(["fleet", "--prometheus", &url, "--http-config", path])
    };
    assert_let_in(&ask("http_headers: {X-Scope-OrgID: {values: [one|two]}}"));
    let refused = ask("{}");
    assert!(refused.refusal().contains("HTTP 401"), "{refused:?}");
}
