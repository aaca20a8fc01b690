// Package mlp is a multi-layer perceptron written by hand, without a tensor
// library or automatic differentiation, so that an example can show every line
// between an image and a gradient.
//
// The layers compute y = x W + b with ReLU between them; the loss is the cross
// entropy of a softmax. [Model.Backward] goes through the layers from the last
// to the first and tells of each parameter as soon as its gradient is there:
// what makes it possible to send the gradients of the last layers to the other
// ranks while the first layers are still being computed.
//
// Everything is float32 and runs on the calling goroutine. Given one seed, the
// same images in the same order and one kind of processor, a model computes the
// same bits each time.
package mlp
