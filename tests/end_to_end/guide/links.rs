//! Check that links within the repository have existing targets.

use super::pages::{self, root};

#[test]
fn every_link_leads_to_a_page_that_is_there() {
    for page in pages::all() {
        for link in &page.links {
            if link.starts_with("https://") || link.starts_with("http://") {
                continue;
            }
            let (file, part) = link.split_once('#').unwrap_or((link, ""));
            let folder = root().join(&page.path).parent().unwrap().to_owned();
            let target = match file {
                "" => root().join(&page.path),
                file => folder.join(file).canonicalize().unwrap_or_else(|error| {
                    panic!("{} links to {link}: {error}", page.path.display())
                }),
            };
            assert!(
                target.starts_with(root()),
                "{}: {link}",
                page.path.display()
            );
            if !part.is_empty() {
                let anchors = pages::read(&target).anchors;
                let there = anchors.iter().any(|anchor| anchor == part);
                assert!(there, "{}: {link}: {anchors:?}", page.path.display());
            }
        }
    }
}

#[test]
fn the_index_names_every_page_once() {
    let index = pages::guide("README.md");
    for page in pages::all() {
        let Ok(name) = page.path.strip_prefix("docs/guide") else {
            continue;
        };
        let name = name.to_str().unwrap();
        if name == "README.md" {
            continue;
        }
        let count = index.links.iter().filter(|link| *link == name).count();
        assert_eq!(count, 1, "{name} in docs/guide/README.md");
    }
}
