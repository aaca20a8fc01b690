// Package dataset gives the examples real data to train on: images with a
// label each, cut into a training part and a held-out part that no training
// step sees.
//
// [Digits] is embedded, so that the examples run with nothing installed: 1797
// scanned digits of 8x8 pixels (see NOTICE for the source and the licence).
// [LoadIDX] reads the files of MNIST and of its descendants, for instance
// Fashion-MNIST, from a folder; a file says how long it is, and none of what it
// says is believed before the bytes are there.
package dataset
